"""Backup and restore of an installation: one tar file, made while the platform runs, put back while it stands still.

    making.py      snapshot → members → manifest            archive.py    the file itself: whole and verified, or not there
    restoring.py   verify → fresh database → load → migrate → aftermath → swap
    aftermath.py   what a restored platform must not believe: attempts, devices, numbers, links

Laws. The file appears under its name when it is complete and on the disk. A restore touches nothing before every checksum has
been verified, fills a database of its own, and puts that in the old one's place in one transaction; killed at any moment before,
it leaves the old one as it was.
"""

from __future__ import annotations


class BackupError(Exception):
    """It cannot be done, or went wrong; the text is for the user."""


class BackupRefused(BackupError):
    """It is not done as asked, and nothing was changed; the text says what to do instead."""
