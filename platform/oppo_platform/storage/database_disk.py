"""Room for the database: looked at by the housekeeper, and a reason to take no new run while there is too little.

What runs goes on and is stored to the last byte: only beginning something new is refused. It ends by itself when there is room.
"""

from __future__ import annotations

import os
import shutil
from datetime import timedelta

import structlog
from django.conf import settings
from django.db import connection, transaction

from oppo_platform import clock
from oppo_platform.byte_sizes import size
from oppo_platform.cluster.disks import is_low
from oppo_platform.storage.models import DatabaseDisk

LOOK_EVERY_S, BELIEVED_S = 10.0, 300.0
# Of a server on this machine whose settings we may read: where its data lies.
DATA_FOLDER = """
    SELECT current_setting('data_directory', true)
     WHERE pg_has_role(current_user, 'pg_read_all_settings', 'USAGE')
       AND (inet_server_addr() IS NULL OR host(inet_server_addr()) IN ('127.0.0.1', '::1'))
"""

log = structlog.get_logger(__name__)


class DatabaseFull(Exception):
    """There is too little room for the database to begin another run; the message says so to whoever submits."""


def look_at_database() -> None:
    """Note how much room is left, at most every ten seconds. Nothing is noted where nobody can tell."""
    now = clock.now()
    with transaction.atomic():
        row = DatabaseDisk.objects.select_for_update().filter(pk=1).first()
        if row is not None and now - row.looked_at < timedelta(seconds=LOOK_EVERY_S):
            return
        free = free_bytes()
        low = free is not None and is_low(free, was=row is not None and row.low)
        DatabaseDisk.objects.update_or_create(pk=1, defaults={"free_bytes": free, "low": low, "looked_at": now})
    if low and (row is None or not row.low):
        log.error("database_disk_low", free_bytes=free)


def free_bytes() -> int | None:
    """Room for the database: on its disk, or up to the size that it may have; None when neither is known."""
    found = []
    folder = settings.OPPO_DATABASE_FOLDER or _data_folder()
    if folder and os.path.isdir(folder):
        found.append(shutil.disk_usage(folder).free)
    if settings.OPPO_DATABASE_MOST_BYTES:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_database_size(current_database())")
            found.append(max(0, int(settings.OPPO_DATABASE_MOST_BYTES) - int(cursor.fetchone()[0])))
    return min(found, default=None)


def _data_folder() -> str:
    with connection.cursor() as cursor:
        cursor.execute(DATA_FOLDER)
        row = cursor.fetchone()
    return row[0] or "" if row else ""


def low_database() -> str:
    """Why no new run is taken, a sentence; empty while there is room. Not believed when nobody has looked for long."""
    row = DatabaseDisk.objects.filter(pk=1, low=True, looked_at__gte=clock.now() - timedelta(seconds=BELIEVED_S)).first()
    if row is None:
        return ""
    left = size(row.free_bytes or 0)
    why = "no new runs are accepted until an administrator frees disk space. Current runs continue."
    return f"The platform's database has {left} of disk left: {why}"


def refuse_without_room() -> None:
    """Raise `DatabaseFull` while there is too little room to begin another run."""
    said = low_database()
    if said:
        raise DatabaseFull(said)
