"""Files of the checkpoints that live runs would go on from, opened at the instant of a backup.

A run that keeps one checkpoint deletes what the backup's instant calls its newest within seconds, and the dump of a database
takes minutes. So for the moment between taking the snapshot and opening these files nobody deletes any
(`oppo_contract.checkpoint_pins`: what is registered is on disk, and who deletes holds a lock). What is open can be read to its
end, deleted or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, LiteralString

import psycopg

from oppo_contract.checkpoint_pins import pins_exist, pins_locked
from oppo_contract.safe_delete import OutsideRootError, file_url_path
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.checkpoints import NotReadable, open_files
from oppo_platform.runs.models import LIVE_ATTEMPT, Checkpoint

LIVE_RUNS: LiteralString = "SELECT DISTINCT run_id FROM runs_attempt WHERE state = ANY(%s) ORDER BY 1"
# Its newest, and the one that somebody chose it to begin with.
NEXT_ONES: LiteralString = """
    SELECT DISTINCT ON (run_id) id FROM runs_checkpoint WHERE run_id = ANY(%(runs)s) ORDER BY run_id, step DESC, id DESC
"""
CHOSEN: LiteralString = "SELECT begins_with_id FROM runs_run WHERE id = ANY(%(runs)s) AND begins_with_id IS NOT NULL"
Opened = dict[int, list[tuple[str, int, int]]]  # by checkpoint: (path in its folder, descriptor, bytes)


@contextmanager
def nothing_deleted(connection: psycopg.Connection[Any]) -> Iterator[list[int]]:
    """Keep live runs whose folders are on this machine from deleting checkpoints. Yields their ids.

    Args:
        connection: the transaction that it is in ends before the first line inside, where the next one may begin.
    """
    runs = [run for (run,) in connection.execute(LIVE_RUNS, [list(LIVE_ATTEMPT)]).fetchall()]
    connection.rollback()
    with ExitStack() as locks:
        for run in runs:
            # Another store, a folder of another account or one that may only be read: left to luck, and told when files are gone.
            with suppress(OutsideRootError, OSError):
                if pins_exist(folder := file_url_path(artifact_url(run))):
                    locks.enter_context(pins_locked(folder))
        yield runs


def open_next_ones(connection: psycopg.Connection[Any], runs: list[int], rows: Iterable[Checkpoint], files: ExitStack) -> Opened:
    """Open what these runs would go on from, as far as it is here. Call inside `nothing_deleted`.

    Args:
        connection: in the backup's transaction.
        runs: ids.
        rows: every checkpoint.
        files: closes what is opened.
    """
    asked = {"runs": runs}
    wanted = {key for query in (NEXT_ONES, CHOSEN) for (key,) in connection.execute(query, asked).fetchall()}
    opened: Opened = {}
    for row in rows:
        if row.pk in wanted:
            with suppress(NotReadable, OSError), ExitStack() as these:  # it is told with its reason when its turn comes
                opened[row.pk] = open_files(row, these)
                files.push(these.pop_all())
    return opened
