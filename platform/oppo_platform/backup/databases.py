"""The server's side of a restore: who is connected, a fresh database, and the transaction in which it takes the old one's place.

`oppo_restoring_1a2b3c4d` is filled → in one transaction `oppo` becomes `oppo_before_20261122024000`, and the new one `oppo`.
PostgreSQL renames no database to which anybody is connected, so the platform must stand still, and is seen to.
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
    """A PostgreSQL server, by way of its database `postgres`, and the database that the platform has there."""

    def __init__(self, url: str, connection: psycopg.Connection[Any]) -> None:
        self.url, self._connection = url, connection
        self.name = database_of(url)

    @property
    def major(self) -> int:
        """18."""
        return self._connection.info.server_version // 10000

    def exists(self) -> bool:
        """Whether the platform's database is there."""
        return self._connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [self.name]).fetchone() is not None

    def refuse_users(self) -> None:
        """Raises BackupRefused while anybody is connected to the platform's database, and says who."""
        users = self._connection.execute(USERS, [self.name]).fetchall()
        if users:
            who = ", ".join(f"{count} × {name} from {host}" for name, host, count in users)
            raise BackupRefused(
                f"The database {self.name} is in use ({who}), and nothing was changed. Stop `oppo up` with Ctrl-C, or web, "
                "scheduler and housekeeper on every machine, then restore. Workers may stay: they have no connection to it."
            )

    def refuse_rights(self) -> None:
        """Raises BackupRefused when this user may not make a database, or not rename the platform's."""
        may, mine = self._connection.execute(
            RIGHTS,
            [self.name],
        ).fetchone()  # type: ignore[misc]
        if not (may and mine):
            user = self._connection.info.user
            raise BackupRefused(
                f"The database user {user} may not make databases or does not own {self.name}. As the server's administrator: "
                f'ALTER USER "{user}" CREATEDB; ALTER DATABASE "{self.name}" OWNER TO "{user}";'
            )

    def url_of(self, name: str) -> str:
        """How clients reach another database there, password included."""
        return make_conninfo("", **{**conninfo_to_dict(self.url), "dbname": name})

    @contextmanager
    def fresh(self) -> Iterator[str]:
        """A new, empty database, by its name; dropped at the end unless it has been given another one by then."""
        self._drop_leftovers()
        name = f"{self.name[:LONGEST_NAME]}{FRESH}{secrets.token_hex(4)}"
        try:
            self._execute("CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8'", name)
            yield name
        except psycopg.errors.DiskFull as error:
            raise BackupError(f"The database server's disk is full: {str(error).strip()}") from error
        finally:
            with suppress(psycopg.Error):
                self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _drop_leftovers(self) -> None:
        """What killed restores have left; the lock says that none goes on."""
        for name in self._named(FRESH):
            self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def kept(self) -> list[str]:
        """Databases that restores have put aside, oldest first."""
        return self._named(KEPT)

    def stamp_at(self, moment: datetime) -> str:
        """20261122024000: the second that names what a restore puts aside; a later one while that name is taken."""
        taken = self.kept()
        while self._kept_name(stamp := f"{moment:%Y%m%d%H%M%S}") in taken:
            moment += timedelta(seconds=1)
        return stamp

    def _kept_name(self, stamp: str) -> str:
        return f"{self.name[:LONGEST_NAME]}{KEPT}{stamp}"

    def drop_kept(self, name: str) -> None:
        """Delete one of them for good. Raises BackupRefused for any other."""
        self._refuse_others(name)
        self._execute("DROP DATABASE {}", name)

    def put_back(self, name: str, moment: datetime) -> str:
        """Let one of them be the platform's again; the present one is put aside. Returns its new name. Raises BackupRefused."""
        self._refuse_others(name)
        self.refuse_users()
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
        """Put the fresh database in the old one's place, both renamed in one transaction. Returns the old one's new name, or "".

        Raises:
            BackupRefused: somebody has connected meanwhile; everything is as it was.
        """
        kept = self._kept_name(stamp) if self.exists() else ""
        try:
            with self._connection.transaction():
                if kept:
                    self._execute("ALTER DATABASE {} RENAME TO {}", self.name, kept)
                self._execute("ALTER DATABASE {} RENAME TO {}", fresh, self.name)
        except psycopg.errors.ObjectInUse:
            self.refuse_users()
            raise BackupRefused(
                f"Somebody was connected to {self.name} just now, and nothing was changed. Restore again."
            ) from None
        return kept

    def _execute(self, statement: LiteralString, *names: str) -> None:
        self._connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@contextmanager
def server_of(url: str) -> Iterator[Server]:
    """The server of the platform's database, for one restore at a time.

    Raises:
        BackupRefused: it cannot be reached, or another restore is under way there.
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


def database_of(url: str) -> str:
    """Its name. Raises BackupRefused when the URL gives none."""
    name = conninfo_to_dict(url).get("dbname")
    if not name:
        raise BackupRefused("DATABASE_URL names no database.")
    return str(name)
