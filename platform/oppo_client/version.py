"""Which client this is, for the platform's log."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _version() -> str:
    try:
        return version("oppo-platform")
    except PackageNotFoundError:  # run from a checkout
        return "0"


AGENT = f"oppo-client/{_version()}"
