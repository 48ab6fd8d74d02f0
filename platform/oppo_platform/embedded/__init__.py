"""Embedded PostgreSQL and Valkey servers from Python wheels, without installation.

    with embedded.postgres(folder) as url:      # postgresql://oppo:…@127.0.0.1:54321/oppo
        …

`oppo up` uses `PostgresServer` and `ValkeyServer`, which can be restarted; other code uses the context managers. A server ends
with the `with` block or when this process dies, also by `kill -9`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oppo_contract.lifeline import Lifeline
from oppo_platform.embedded.postgres import PostgresServer
from oppo_platform.embedded.server import EmbeddedServer, ServerError
from oppo_platform.embedded.valkey import ValkeyServer

__all__ = ["EmbeddedServer", "PostgresServer", "ServerError", "ValkeyServer", "postgres", "valkey"]


@contextmanager
def postgres(home: Path, *, throwaway: bool = False) -> Iterator[str]:
    """Run PostgreSQL with its data below `home`; yields its URL once it accepts connections.

    Args:
        home: folder for data, password and log; persistent.
        throwaway: for tests: faster without durability, and the data is removed at the end.

    Raises:
        ServerError: it could not be started; the text has the reason and the log's last lines.
    """
    with _running(PostgresServer(home, throwaway=throwaway)) as url:
        yield url


@contextmanager
def valkey(home: Path, *, throwaway: bool = False) -> Iterator[str]:
    """Run Valkey with its files below `home`; yields its URL once it responds. Otherwise as `postgres`."""
    with _running(ValkeyServer(home, throwaway=throwaway)) as url:
        yield url


@contextmanager
def _running(server: EmbeddedServer) -> Iterator[str]:
    with Lifeline() as lifeline:
        try:
            server.start(lifeline.fd)
            server.wait_until_ready()
            yield server.url
        finally:
            server.stop()
            if server.throwaway:
                server.remove_data()
