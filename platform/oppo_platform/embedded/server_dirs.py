"""Folders and uid of embedded servers.

For an ordinary user, servers run under the user's uid, with data below `OPPO_HOME` and the programs of the installed wheels.
PostgreSQL refuses to run as root, and another uid cannot enter a 0700 home: as root, programs are copied to
`/var/lib/oppo/programs`, data is in `/var/lib/oppo/<hash of OPPO_HOME>`, and each home has an unprivileged uid of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from oppo_contract.machine import write_private

SYSTEM_FOLDER = Path("/var/lib/oppo")
# Uids that Linux distributions reserve for services without an account, within the uid map of containers.
FIRST_UID, LAST_UID = 61184, 65519


@dataclass(frozen=True, slots=True)
class ServerDirs:
    """Folders and account of a home's servers. `user` is (uid, gid), or None for the current user."""

    home: Path
    data: Path
    user: tuple[int, int] | None

    @classmethod
    def create(cls, home: Path) -> ServerDirs:
        """Create missing folders of `home`.

        Raises:
            OSError: a folder cannot be created or given to the uid.
        """
        home = home.resolve()
        (home / "secrets").mkdir(parents=True, exist_ok=True)
        (home / "secrets").chmod(0o700)
        (home / "logs").mkdir(exist_ok=True)
        if os.geteuid() != 0:
            return cls(home, _ensure_folder(home / "servers", 0o700), None)
        digest = hashlib.sha256(str(home).encode()).hexdigest()
        data = _ensure_folder(_ensure_folder(SYSTEM_FOLDER, 0o755) / digest[:24], 0o700)
        owner = data.stat().st_uid
        uid = owner if owner else _free_uid(int(digest[:8], 16))
        os.chown(data, uid, uid)
        return cls(home, data, (uid, uid))

    def program_folder(self, installed: Path, packages: list[str], label: str) -> Path:
        """A folder with programs of some packages that the server's account can run.

        Args:
            installed: the folder with the installed packages.
            packages: their folder names; siblings, because programs load libraries from there. Missing ones are skipped.
            label: name and version of the programs: the machine has one copy of each.

        Returns:
            `installed` itself, or as root a world-readable copy.
        """
        if self.user is None:
            return installed
        copy = _ensure_folder(SYSTEM_FOLDER / "programs", 0o755) / label
        if not copy.exists():
            fresh = copy.with_name(f"{label}.{secrets.token_hex(4)}")
            fresh.mkdir()
            for package in packages:
                if (installed / package).exists():
                    shutil.copytree(
                        installed / package, fresh / package, ignore=shutil.ignore_patterns("include", "pgxs", "*.a", "*.py*")
                    )
            _make_world_readable(fresh)
            try:
                fresh.rename(copy)
            except OSError:
                shutil.rmtree(fresh)
                if not copy.exists():  # otherwise a concurrent start was faster
                    raise
        return copy

    def chown(self, path: Path) -> Path:
        """Give a file, or a folder with its content, to the server's account."""
        if self.user is not None:
            uid, gid = self.user
            for folder, _, files in os.walk(path):
                os.chown(folder, uid, gid)
                for name in files:
                    os.chown(Path(folder, name), uid, gid, follow_symlinks=False)
            os.chown(path, uid, gid)
        return path

    def password(self, server: str) -> str:
        """The server's password, created at first use and saved in a 0600 file below the home."""
        file = self.home / "secrets" / f"{server}.password"
        if not file.exists():
            write_private(file, secrets.token_urlsafe(24))
        return file.read_text().strip()


def _ensure_folder(folder: Path, mode: int) -> Path:
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(mode)  # regardless of the umask
    return folder


def _free_uid(start: int) -> int:
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    span = LAST_UID - FIRST_UID + 1
    return next(uid for uid in (FIRST_UID + (start + i) % span for i in range(span)) if uid not in taken)


def _make_world_readable(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def package_folder(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the package {name} is not installed")
    return Path(spec.origin).parent
