"""Database operations of a restore: check connections, create a fresh database, and swap it with the old one.

`oppo_restoring_1a2b3c4d` is filled → in one transaction `oppo` becomes `oppo_before_20261122024000`, and the new one `oppo`.
PostgreSQL cannot rename a database with open connections, so the platform must be stopped.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from oppo_platform.backup import BackupError, BackupRefused

FRESH, KEPT = "_restoring_", "_before_"
LONGEST_NAME = 63 - 24  # PostgreSQL's limit less the longest ending
RESTORE_LOCK = 0x6F70706F_62616B  # oppo, bak
USERS: LiteralString = """
    SELECT coalesce(nullif(application_name, ''), 'a client'), coalesce(host(client_addr), 'this machine'), count(*)
      FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend' AND pid <> pg_backend_pid()
     GROUP BY 1, 2 ORDER BY 3 DESC
"""

RIGHTS: LiteralString = """
    SELECT rolcreatedb OR rolsuper,
           coalesce((SELECT pg_has_role(datdba, 'USAGE') FROM pg_database WHERE datname = %s), true)
      FROM pg_roles WHERE rolname = current_user
"""


class Server:
    """A PostgreSQL server, connected through its database `postgres`, and the platform's database `name` there."""

    def __init__(self, url: str, connection: psycopg.Connection[Any]) -> None:
        self.url, self._connection = url, connection
        self.name = database_name(url)

    @property
    def major(self) -> int:
        """Major version, for example 18."""
        return self._connection.info.server_version // 10000

    def exists(self) -> bool:
        """Whether the platform's database exists."""
        return self._connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [self.name]).fetchone() is not None

    def check_unused(self) -> None:
        """Raises BackupRefused with a list of clients while any is connected to the platform's database."""
        users = self._connection.execute(USERS, [self.name]).fetchall()
        if users:
            who = ", ".join(f"{count} × {name} from {host}" for name, host, count in users)
            raise BackupRefused(
                f"The database {self.name} is in use ({who}), and nothing was changed. Stop `oppo up` with Ctrl-C, or web, "
                "scheduler and housekeeper on every machine, then restore. Workers may stay: they have no connection to it."
            )

    def check_rights(self) -> None:
        """Raises BackupRefused if this user may not create databases or rename the platform's."""
        may, mine = self._connection.execute(RIGHTS, [self.name]).fetchone()  # type: ignore[misc]
        if not (may and mine):
            user = self._connection.info.user
            raise BackupRefused(
                f"The database user {user} may not make databases or does not own {self.name}. As the server's administrator: "
                f'ALTER USER "{user}" CREATEDB; ALTER DATABASE "{self.name}" OWNER TO "{user}";'
            )

    def url_of(self, name: str) -> str:
        """URL of another database on the server, with password."""
        return make_conninfo("", **{**conninfo_to_dict(self.url), "dbname": name})

    @contextmanager
    def fresh(self) -> Iterator[str]:
        """Yields the name of a new, empty database; dropped at the end unless it was renamed."""
        for left in self._named(FRESH):  # of killed restores: the lock excludes a running one
            self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", left)
        name = f"{self.name[:LONGEST_NAME]}{FRESH}{secrets.token_hex(4)}"
        try:
            self._execute("CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8'", name)
            yield name
        except psycopg.errors.DiskFull as error:
            raise BackupError(f"The database server's disk is full: {str(error).strip()}") from error
        finally:
            with suppress(psycopg.Error):
                self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def kept(self) -> list[str]:
        """Previous databases kept by restores, oldest first."""
        return self._named(KEPT)

    def stamp_at(self, moment: datetime) -> str:
        """Time stamp for the name of a kept database, like 20261122024000; later if that name is taken."""
        taken = self.kept()
        while self._kept_name(stamp := f"{moment:%Y%m%d%H%M%S}") in taken:
            moment += timedelta(seconds=1)
        return stamp

    def _kept_name(self, stamp: str) -> str:
        return f"{self.name[:LONGEST_NAME]}{KEPT}{stamp}"

    def drop_kept(self, name: str) -> None:
        """Delete a kept database permanently. Raises BackupRefused for any other."""
        self._refuse_others(name)
        self._execute("DROP DATABASE {}", name)

    def swap_kept(self, name: str, moment: datetime) -> str:
        """Swap a kept database with the current one. Returns the current one's new name. Raises BackupRefused."""
        self._refuse_others(name)
        self.check_unused()
        return self.swap(name, self.stamp_at(moment))

    def _refuse_others(self, name: str) -> None:
        if name not in self.kept():
            raise BackupRefused(
                f"{name} is no database that a restore has put aside. There are: {', '.join(self.kept()) or 'none'}."
            )

    def _named(self, ending: str) -> list[str]:
        start = f"{self.name[:LONGEST_NAME]}{ending}"
        found = self._connection.execute("SELECT datname FROM pg_database WHERE starts_with(datname, %s) ORDER BY 1", [start])
        return [name for (name,) in found.fetchall()]

    def swap(self, fresh: str, stamp: str) -> str:
        """Rename both databases in one transaction. Returns the old one's new name, or "" if there was none.

        Raises:
            BackupRefused: a client has connected meanwhile; nothing was changed.
        """
        kept = self._kept_name(stamp) if self.exists() else ""
        try:
            with self._connection.transaction():
                if kept:
                    self._execute("ALTER DATABASE {} RENAME TO {}", self.name, kept)
                self._execute("ALTER DATABASE {} RENAME TO {}", fresh, self.name)
        except psycopg.errors.ObjectInUse:
            self.check_unused()
            raise BackupRefused(
                f"A client was connected to {self.name} just now, and nothing was changed. Restore again."
            ) from None
        return kept

    def _execute(self, statement: LiteralString, *names: str) -> None:
        self._connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@contextmanager
def connect_server(url: str) -> Iterator[Server]:
    """Connect to the server of the platform's database, and lock it for one restore at a time.

    Raises:
        BackupRefused: it cannot be reached, or another restore is in progress.
    """
    try:
        connection = psycopg.connect(
            make_conninfo("", **{**conninfo_to_dict(url), "dbname": "postgres"}),
            autocommit=True,
            connect_timeout=10,
            application_name="oppo restore",
        )
    except psycopg.OperationalError as error:
        raise BackupRefused(f"The database server cannot be reached: {str(error).strip()}") from error
    with connection:
        if not connection.execute("SELECT pg_try_advisory_lock(%s)", [RESTORE_LOCK]).fetchone()[0]:  # type: ignore[index]
            raise BackupRefused("Another restore is under way on this server.")
        yield Server(url, connection)


def database_name(url: str) -> str:
    """The database name in a URL. Raises BackupRefused without one."""
    name = conninfo_to_dict(url).get("dbname")
    if not name:
        raise BackupRefused("DATABASE_URL names no database.")
    return str(name)
