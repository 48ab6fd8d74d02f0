"""Generated pages of docs/ (`python -m scripts.reference`, part of `make docs`; a test compares them)."""

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


def generate(path: str) -> str:
    """The text of a page."""
    _set_up()
    page: str = importlib.import_module(f"scripts.reference.{PAGES[path]}").page()
    return page.rstrip() + "\n"


def _set_up() -> None:
    # Some pages import the platform's models; no database is needed.
    import django
    from django.apps import apps

    if not apps.ready:
        if "OPPO_HOME" not in os.environ:
            home = tempfile.TemporaryDirectory(prefix="oppo-reference-")
            atexit.register(home.cleanup)
            os.environ["OPPO_HOME"] = home.name
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "oppo_platform.settings")
        django.setup()
