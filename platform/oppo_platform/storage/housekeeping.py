"""The storage's part of a round of housekeeping."""

from __future__ import annotations

from collections.abc import Iterable

from oppo_platform.storage.database_disk import look_at_database
from oppo_platform.storage.folders import delete_here
from oppo_platform.storage.measuring import add_up, measure_some, told_more
from oppo_platform.storage.purging import purge
from oppo_platform.storage.retention import retain


def make_room(sealed: Iterable[int]) -> None:
    """One round: measures what runs take, and deletes what is due. Several housekeepers at once are harmless.

    Args:
        sealed: attempts that told something since the round before.
    """
    look_at_database()
    told_more(sealed)
    purged = purge() + retain()
    if not measure_some() and purged:
        add_up()
    delete_here()
