"""The pages of docs/ that are written from code, so that they cannot say anything else than it does."""

from __future__ import annotations

import atexit
import importlib
import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "docs/configuration.md": "configuration",
    "docs/reference/api.md": "api",
    "docs/reference/commands.md": "commands",
    "docs/reference/events.md": "events",
    "docs/reference/states.md": "states",
}


def text_of(path: str) -> str:
    """A page as the code would have it."""
    _set_up()
    page: str = importlib.import_module(f"scripts.reference.{PAGES[path]}").page()
    return page.rstrip() + "\n"


def _set_up() -> None:
    # Some pages read the platform's models; nothing is asked of a database.
    import django
    from django.apps import apps

    if not apps.ready:
        if "OPPO_HOME" not in os.environ:
            home = tempfile.TemporaryDirectory(prefix="oppo-reference-")
            atexit.register(home.cleanup)
            os.environ["OPPO_HOME"] = home.name
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "oppo_platform.settings")
        django.setup()
