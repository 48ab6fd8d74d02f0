"""Backup and restore of an installation: one tar file, created while the platform runs, restored while it is stopped.

    create.py         snapshot → members → manifest            archive.py    the tar file and its checksums
    restore.py        verify → fresh database → load → migrate → post_restore → swap
    post_restore.py   invalidates state that has changed since the backup: attempts, devices, numbers, links

Guarantees. The file gets its name when it is complete and synced. A restore verifies every checksum first, fills a database of
its own, and swaps it with the old one in one transaction; if killed before, the old database is unchanged.
"""

from __future__ import annotations


class BackupError(Exception):
    """A backup or restore failed; the text is for the user."""


class BackupRefused(BackupError):
    """A request is refused and nothing was changed; the text has a remedy."""
