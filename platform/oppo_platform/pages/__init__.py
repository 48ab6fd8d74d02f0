"""The pages: access check, one selector, template. What moves on them comes from the JSON API (docs/interfaces.md)."""
