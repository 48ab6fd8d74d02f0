"""Print the path of a Chromium for the browser tests, and get one when the machine has none.

In this order: $OPPO_CHROMIUM, a chromium or Chrome on PATH, Playwright's own; then, as root on Debian, the package
`chromium` by apt-get; then Playwright's download. Only the path goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ADVICE = (
    "No Chromium was found for the browser tests and none could be installed. Install one (Debian: apt-get install chromium) "
    "or set OPPO_CHROMIUM to the path of a Chromium or Chrome."
)


def main() -> int:
    """Print the path; the exit status is 1, with advice, when there is no browser."""
    named = os.environ.get("OPPO_CHROMIUM")
    if named and not runs(named):
        print(f"OPPO_CHROMIUM is {named}, which does not start.", file=sys.stderr)
        return 1
    found = named or installed() or by_apt() or by_playwright()
    if not found:
        print(ADVICE, file=sys.stderr)
        return 1
    print(found)
    return 0


def installed() -> str | None:
    """A browser that is already there, on PATH or in Playwright's folder."""
    on_path = (shutil.which(command) for command in COMMANDS)
    return next((path for path in [*on_path, playwrights_own()] if path and runs(path)), None)


def by_apt() -> str | None:
    """Debian's own package, when we may install one: root, on Debian."""
    release = Path("/etc/os-release")
    debian = release.exists() and "ID=debian" in release.read_text(encoding="utf-8").splitlines()
    if os.geteuid() != 0 or not debian or not shutil.which("apt-get"):
        return None
    print("installing Debian's chromium for the browser tests (apt-get, because this is root)", file=sys.stderr)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "chromium"]
    # The lists of a fresh machine are empty or old: try what is there, then refresh them once.
    return (
        installed()
        if succeeds(install, environment)
        or (succeeds(["apt-get", "update", "--quiet"], environment) and succeeds(install, environment))
        else None
    )


def by_playwright() -> str | None:
    """Playwright's download, into the user's cache folder."""
    print("downloading Playwright's Chromium for the browser tests", file=sys.stderr)
    return installed() if succeeds([sys.executable, "-m", "playwright", "install", "chromium"], dict(os.environ)) else None


def playwrights_own() -> str | None:
    """Where Playwright would have put its Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        return shutil.which(playwright.chromium.executable_path)


def runs(path: str) -> bool:
    """Whether the browser starts at all (a download may lack system libraries)."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def succeeds(command: list[str], environment: dict[str, str]) -> bool:
    """Run a command with its output on standard error."""
    return subprocess.run(command, stdout=sys.stderr, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
