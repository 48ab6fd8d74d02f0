"""Disk usage of runs: deletion with a trash, retention, quotas, and low disks (docs/storage.md)."""
