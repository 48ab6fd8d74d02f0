"""The space that runs take: deletion with a trash, retention, quotas, and disks that run full (docs/storage.md)."""
