"""Ports on 127.0.0.1 that stay the same: a restarted server comes back where its clients look for it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"


def remembered_port(home: Path, name: str, preferred: int | None = None) -> int:
    """The port of `name`, kept in `home/ports.json`; a new one when it has none yet or somebody else took it meanwhile.

    Args:
        home: the folder that remembers.
        name: whose port.
        preferred: tried first when none is remembered.
    """
    known = _remembered(home).get(name, preferred)
    port = known if known is not None and is_free(known) else _any_free_port()
    remember_port(home, name, port)
    return port


def remember_port(home: Path, name: str, port: int) -> None:
    """From now on this is the port of `name`."""
    ports = _remembered(home)
    if ports.get(name) == port:
        return
    fresh = (home / "ports.json").with_suffix(".new")
    fresh.write_text(json.dumps({**ports, name: port}, indent=1))
    fresh.replace(home / "ports.json")


def _remembered(home: Path) -> dict[str, int]:
    file = home / "ports.json"
    return json.loads(file.read_text()) if file.exists() else {}


def is_free(port: int) -> bool:
    """Whether nobody listens on the port of this machine's loopback address."""
    with socket.socket() as probe:
        # As servers do: a connection that lingers from an earlier life does not make the port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _any_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
