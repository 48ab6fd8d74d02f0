"""The pages: access check, one selector, template. Live parts use the JSON API (docs/interfaces.md)."""
