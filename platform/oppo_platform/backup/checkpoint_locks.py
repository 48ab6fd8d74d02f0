"""Opens files of the checkpoints that live runs would resume from, at the instant of a backup.

A run that keeps one checkpoint deletes its newest one of that instant within seconds, and a database dump takes minutes. Between
the snapshot and the opening of these files, deletion is therefore locked out (`oppo_contract.checkpoint_pins`). Open files remain
readable after their deletion.
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
# A run's newest checkpoint, and the one it was submitted to begin with.
NEWEST: LiteralString = """
    SELECT DISTINCT ON (run_id) id FROM runs_checkpoint WHERE run_id = ANY(%(runs)s) ORDER BY run_id, step DESC, id DESC
"""
CHOSEN: LiteralString = "SELECT begins_with_id FROM runs_run WHERE id = ANY(%(runs)s) AND begins_with_id IS NOT NULL"
Opened = dict[int, list[tuple[str, int, int]]]  # by checkpoint: (path in its folder, descriptor, bytes)


@contextmanager
def deletion_locked(connection: psycopg.Connection[Any]) -> Iterator[list[int]]:
    """Lock the checkpoint folders of live runs on this machine against deletion. Yields the ids of live runs.

    Ends the connection's transaction before it yields, so that the caller can begin the next one.
    """
    runs = [run for (run,) in connection.execute(LIVE_RUNS, [list(LIVE_ATTEMPT)]).fetchall()]
    connection.rollback()
    with ExitStack() as locks:
        for run in runs:
            # Other stores and folders without write access are not locked; missing files are reported later.
            with suppress(OutsideRootError, OSError):
                if pins_exist(folder := file_url_path(artifact_url(run))):
                    locks.enter_context(pins_locked(folder))
        yield runs


def open_resume_checkpoints(
    connection: psycopg.Connection[Any], runs: list[int], rows: Iterable[Checkpoint], files: ExitStack
) -> Opened:
    """Open local files of the checkpoints that these runs would resume from. Call inside `deletion_locked`.

    Args:
        connection: in the backup's transaction.
        runs: ids.
        rows: every checkpoint.
        files: closes the opened files.
    """
    needed = {key for query in (NEWEST, CHOSEN) for (key,) in connection.execute(query, {"runs": runs}).fetchall()}
    opened: Opened = {}
    for row in rows:
        if row.pk in needed:
            with suppress(NotReadable, OSError), ExitStack() as these:  # the error is reported when the files are copied
                opened[row.pk] = open_files(row, these)
                files.push(these.pop_all())
    return opened
