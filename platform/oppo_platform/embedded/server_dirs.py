"""Where an embedded server's programs and data live, and under which uid it runs.

An ordinary user runs them as himself, with the data below `OPPO_HOME` and the programs where pip put them. PostgreSQL refuses
root, and another uid cannot enter a 0700 home: as root, programs are copied to `/var/lib/oppo/programs`, data lives in
`/var/lib/oppo/<hash of OPPO_HOME>`, and each home has an unprivileged uid of its own. The home itself is never touched.
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
# Numbers that Linux distributions leave to services without an account, and that a container's small uid map still holds.
FIRST_UID, LAST_UID = 61184, 65519


@dataclass(frozen=True, slots=True)
class Quarters:
    """A server's folder and account. `user` is (uid, gid), or None for the user we are."""

    home: Path
    data: Path
    user: tuple[int, int] | None

    @classmethod
    def for_home(cls, home: Path) -> Quarters:
        """Create what is missing and return the quarters of `home`.

        Raises:
            OSError: a folder cannot be created or given to the uid.
        """
        home = home.resolve()
        (home / "secrets").mkdir(parents=True, exist_ok=True)
        (home / "secrets").chmod(0o700)
        (home / "logs").mkdir(exist_ok=True)
        if os.geteuid() != 0:
            return cls(home, _made(home / "servers", 0o700), None)
        digest = hashlib.sha256(str(home).encode()).hexdigest()
        data = _made(_made(SYSTEM_FOLDER, 0o755) / digest[:24], 0o700)
        owner = data.stat().st_uid
        uid = owner if owner else _free_uid(int(digest[:8], 16))
        os.chown(data, uid, uid)
        return cls(home, data, (uid, uid))

    def program_folder(self, installed: Path, packages: list[str], label: str) -> Path:
        """A folder below which the server's account can run the programs of some packages.

        Args:
            installed: where pip put the packages.
            packages: their folders; kept side by side, because programs look for their libraries there. Missing ones are skipped.
            label: name and version of the programs: one copy of each is kept on the machine.

        Returns:
            `installed` itself, or as root a copy that everybody may read.
        """
        if self.user is None:
            return installed
        copy = _made(SYSTEM_FOLDER / "programs", 0o755) / label
        if not copy.exists():
            fresh = copy.with_name(f"{label}.{secrets.token_hex(4)}")
            fresh.mkdir()
            for package in packages:
                if (installed / package).exists():
                    shutil.copytree(
                        installed / package, fresh / package, ignore=shutil.ignore_patterns("include", "pgxs", "*.a", "*.py*")
                    )
            _let_everybody_read(fresh)
            try:
                fresh.rename(copy)
            except OSError:
                shutil.rmtree(fresh)
                if not copy.exists():  # not merely another start that was faster
                    raise
        return copy

    def give(self, path: Path) -> Path:
        """Hand a file, or a folder with all that is in it, to the server's account."""
        if self.user is not None:
            uid, gid = self.user
            for folder, _, files in os.walk(path):
                os.chown(folder, uid, gid)
                for name in files:
                    os.chown(Path(folder, name), uid, gid, follow_symlinks=False)
            os.chown(path, uid, gid)
        return path

    def password(self, server: str) -> str:
        """The server's password, made at its first use and kept in a 0600 file below the home."""
        file = self.home / "secrets" / f"{server}.password"
        if not file.exists():
            write_private(file, secrets.token_urlsafe(24))
        return file.read_text().strip()


def _made(folder: Path, mode: int) -> Path:
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(mode)  # whatever the umask says
    return folder


def _free_uid(start: int) -> int:
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    span = LAST_UID - FIRST_UID + 1
    return next(uid for uid in (FIRST_UID + (start + i) % span for i in range(span)) if uid not in taken)


def _let_everybody_read(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def package_folder(name: str) -> Path:
    """Where a package is installed, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise FileNotFoundError(f"the package {name} is not installed")
    return Path(found.origin).parent
