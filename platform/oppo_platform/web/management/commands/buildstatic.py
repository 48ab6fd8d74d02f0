"""Collect, hash and compress the static files if they have changed."""

from __future__ import annotations

import hashlib
from typing import Any

from django.conf import settings
from django.contrib.staticfiles.finders import get_finders
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.test.utils import override_settings

STAMP = "built.txt"
# htmx 4 is one of many files of its package.
UNUSED = ["django_htmx/ext/*", "django_htmx/htmax*", "django_htmx/htmx-2*", "django_htmx/htmx-4.js"]


class Command(BaseCommand):
    """`manage.py buildstatic`: run it before the web process starts; without changes it takes a few milliseconds."""

    help = "Collect, hash and compress the static files if they have changed."

    def handle(self, *args: Any, **options: Any) -> None:
        """Compare the fingerprint, and build if it differs."""
        stamp = settings.STATIC_ROOT / STAMP
        wanted = fingerprint()
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        storages = {**settings.STORAGES, "staticfiles": {"BACKEND": "oppo_platform.web.static_files.HashedStatic"}}
        with override_settings(STORAGES=storages):
            call_command("collectstatic", interactive=False, clear=True, verbosity=0, ignore_patterns=UNUSED)
        stamp.write_text(wanted)


def fingerprint() -> str:
    """Digest over name, size and time of every static file."""
    digest = hashlib.sha256(repr(UNUSED).encode())
    for finder in get_finders():
        for name, storage in sorted(finder.list(["CVS", ".*", "*~"]), key=lambda files: files[0]):
            size, changed = storage.size(name), storage.get_modified_time(name).timestamp()
            digest.update(f"{name}\0{size}\0{changed}\n".encode())
    return digest.hexdigest()
