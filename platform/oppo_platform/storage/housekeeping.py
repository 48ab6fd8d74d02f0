"""The storage's part of housekeeping, in two: what is quick, with every round, and what makes room, which may take minutes."""

from __future__ import annotations

from collections.abc import Iterable

from oppo_platform.storage.artifact_deletion import delete_here
from oppo_platform.storage.database_disk import look_at_database
from oppo_platform.storage.purging import purge
from oppo_platform.storage.retention import retain
from oppo_platform.storage.usage import add_up, measure_some, told_more


def take_stock(sealed: Iterable[int]) -> None:
    """Look at the database's disk and measure what runs take. Several housekeepers at once are harmless.

    Args:
        sealed: attempts that told something since the round before.
    """
    look_at_database()
    told_more(sealed)
    measure_some()


def make_room() -> int:
    """One round: deletes what is due, rows first, then folders. Several at once are harmless. Outside transactions only.

    Returns:
        How many rows, runs thinned by retention and folders are done.
    """
    made = purge() + retain()
    if made:
        add_up()
    return made + delete_here()
