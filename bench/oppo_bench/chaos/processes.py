"""The platform's processes by kind, also those that outlived their parents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

# Kind → words of its command line, all of which it has.
KINDS: dict[str, tuple[str, ...]] = {
    "engine": ("-m oppo_core", "--spec"),
    "supervisor": ("-m worker supervise",),
    "agent": ("-m worker agent",),
    "consumer": ("celery",),
    "fork server": ("oppo_contract.prefork",),
    "web": ("oppo_cli web",),
    "scheduler": ("oppo_cli scheduler",),
    "housekeeper": ("oppo_cli housekeeper",),
    "database": ("postgres", " -D "),
    "broker": ("valkey-server",),
}
GUARDS = ("lifeline.py", "--guard")


def find(kind: str, home: Path) -> list[psutil.Process]:
    """Living processes of one kind that belong to the platform in `home`."""
    return [process for process, line in _ours(home) if all(word in line for word in KINDS[kind])]


def _ours(home: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Processes below this one, and those whose environment or command line names the home, each with its command line."""
    below = {process.pid for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            ours = process.pid in below or str(home) in line or process.environ().get("OPPO_HOME", "").startswith(str(home))
            if (
                ours
                and process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and not any(g in line for g in GUARDS)
            ):
                yield process, line
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
