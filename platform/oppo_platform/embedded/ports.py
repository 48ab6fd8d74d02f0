"""Persistent ports on 127.0.0.1: a restarted server uses the same port."""

from __future__ import annotations

import json
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"


def saved_port(home: Path, name: str, preferred: int | None = None) -> int:
    """The port of the server `name`, saved in `home/ports.json`; a new one if it has none, or its port is in use.

    `preferred` is tried first if none is saved.
    """
    known = _saved_ports(home).get(name, preferred)
    port = known if known is not None and is_free(known) else _any_free_port()
    save_port(home, name, port)
    return port


def save_port(home: Path, name: str, port: int) -> None:
    """Save the port of `name`."""
    ports = _saved_ports(home)
    if ports.get(name) == port:
        return
    fresh = (home / "ports.json").with_suffix(".new")
    fresh.write_text(json.dumps({**ports, name: port}, indent=1))
    fresh.replace(home / "ports.json")


def _saved_ports(home: Path) -> dict[str, int]:
    file = home / "ports.json"
    return json.loads(file.read_text()) if file.exists() else {}


def is_free(port: int) -> bool:
    """Whether a server can bind the port on the loopback address."""
    with socket.socket() as probe:
        # Like servers: connections in TIME_WAIT do not block the port.
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
