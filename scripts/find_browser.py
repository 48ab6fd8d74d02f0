"""Print the path of a Chromium for the browser tests; install one if necessary.

Order: $OPPO_CHROMIUM, Chromium or Chrome on PATH, Playwright's; then apt-get (root on Debian), then Playwright's download.
Standard output is the path only; messages go to standard error.
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
    """Print the path. Exit status 1 without a browser."""
    configured = os.environ.get("OPPO_CHROMIUM")
    if configured and not starts(configured):
        print(f"OPPO_CHROMIUM is {configured}, which does not start.", file=sys.stderr)
        return 1
    path = configured or find_installed() or install_by_apt() or install_by_playwright()
    if not path:
        print(ADVICE, file=sys.stderr)
        return 1
    print(path)
    return 0


def find_installed() -> str | None:
    """An installed browser, on PATH or in Playwright's folder."""
    on_path = (shutil.which(command) for command in COMMANDS)
    return next((path for path in [*on_path, playwright_path()] if path and starts(path)), None)


def install_by_apt() -> str | None:
    """Install Debian's package, if this is root on Debian."""
    release = Path("/etc/os-release")
    debian = release.exists() and "ID=debian" in release.read_text(encoding="utf-8").splitlines()
    if os.geteuid() != 0 or not debian or not shutil.which("apt-get"):
        return None
    print("installing Debian's chromium for the browser tests (apt-get, because this is root)", file=sys.stderr)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "chromium"]
    # The package lists of a fresh machine may be empty or old: retry after an update.
    update = ["apt-get", "update", "--quiet"]
    if run(install, environment) or (run(update, environment) and run(install, environment)):
        return find_installed()
    return None


def install_by_playwright() -> str | None:
    """Download Playwright's Chromium into the user's cache folder."""
    print("downloading Playwright's Chromium for the browser tests", file=sys.stderr)
    return find_installed() if run([sys.executable, "-m", "playwright", "install", "chromium"], dict(os.environ)) else None


def playwright_path() -> str | None:
    """Playwright's Chromium, if it is installed."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        return shutil.which(playwright.chromium.executable_path)


def starts(path: str) -> bool:
    """Whether the browser starts; a download may lack system libraries."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def run(command: list[str], environment: dict[str, str]) -> bool:
    """Run a command with its output on standard error. Returns whether it succeeded."""
    return subprocess.run(command, stdout=sys.stderr, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
