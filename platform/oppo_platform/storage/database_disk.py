"""Free disk of the database: checked by the housekeeper; submission is refused while it is low.

Current runs continue and are stored completely. Submission works again as soon as there is space.
"""

from __future__ import annotations

import os
import shutil
from datetime import timedelta

import structlog
from django.conf import settings
from django.db import connection, transaction

from oppo_contract.byte_sizes import size
from oppo_platform import clock
from oppo_platform.cluster.disks import is_low
from oppo_platform.storage.models import DatabaseDisk

CHECK_EVERY_S, MAX_AGE_S = 10.0, 300.0
# The data directory of a local server, if the role may read its settings.
DATA_FOLDER = """
    SELECT current_setting('data_directory', true)
     WHERE pg_has_role(current_user, 'pg_read_all_settings', 'USAGE')
       AND (inet_server_addr() IS NULL OR host(inet_server_addr()) IN ('127.0.0.1', '::1'))
"""

log = structlog.get_logger(__name__)


class DatabaseFull(Exception):
    """The database's disk is too low for a new run; the message is for the user who submits."""


def check_database_disk() -> None:
    """Record the free space, at most every ten seconds."""
    now = clock.now()
    with transaction.atomic():
        row = DatabaseDisk.objects.select_for_update().filter(pk=1).first()
        if row is not None and now - row.looked_at < timedelta(seconds=CHECK_EVERY_S):
            return
        free = free_bytes()
        low = free is not None and is_low(free, was=row is not None and row.low)
        DatabaseDisk.objects.update_or_create(pk=1, defaults={"free_bytes": free, "low": low, "looked_at": now})
    if low and (row is None or not row.low):
        log.error("database_disk_low", free_bytes=free)


def free_bytes() -> int | None:
    """Free space on the database's disk, or up to its configured maximum size; None if neither is known."""
    limits = []
    folder = settings.OPPO_DATABASE_FOLDER or _data_folder()
    if folder and os.path.isdir(folder):
        limits.append(shutil.disk_usage(folder).free)
    if settings.OPPO_DATABASE_MOST_BYTES:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_database_size(current_database())")
            limits.append(max(0, int(settings.OPPO_DATABASE_MOST_BYTES) - int(cursor.fetchone()[0])))
    return min(limits, default=None)


def _data_folder() -> str:
    with connection.cursor() as cursor:
        cursor.execute(DATA_FOLDER)
        row = cursor.fetchone()
    return row[0] or "" if row else ""


def low_database() -> str:
    """The reason why new runs are refused, a sentence; empty while there is space, or if the last check is old."""
    row = DatabaseDisk.objects.filter(pk=1, low=True, looked_at__gte=clock.now_in_query() - timedelta(seconds=MAX_AGE_S)).first()
    if row is None:
        return ""
    left = size(row.free_bytes or 0)
    why = "no new runs are accepted until an administrator frees disk space. Current runs continue."
    return f"The platform's database has {left} of disk left: {why}"


def require_database_space() -> None:
    """Raise `DatabaseFull` while the database's disk is too low for a new run."""
    if reason := low_database():
        raise DatabaseFull(reason)
