"""Rows that a process keeps between scheduler cycles and reads again only when they have changed.

PostgreSQL writes a new version of a row with every update; `xmin` and `ctid` (transaction and place) identify it. The names of
ten thousand versions are read in one value, in a fraction of the time that the rows take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from django.db import connection

# All rows are read this often, seconds: after a restore transaction ids are assigned again.
READ_ALL_S = 60.0

Row = TypeVar("Row")


class KeptRows(Generic[Row]):
    """The rows of a query by id, read from the database once per version."""

    def __init__(self, versions: str, read: Callable[[Sequence[int]], Mapping[int, Row]]) -> None:
        """`versions`: SQL of one text, `id:version` of each row, separated by spaces. `read`: rows by id.

        The version must include whatever of other tables `read` joins. A row that `read` does not find has changed meanwhile.
        """
        self._versions = versions
        self._read = read
        self._kept: dict[str, tuple[int, Row]] = {}
        self._last: tuple[str, dict[int, Row]] | None = None  # the last versions and their rows
        self._since = time.monotonic()

    def rows(self, *parameters: object) -> dict[int, Row]:
        """The present rows. `parameters` are those of the SQL."""
        with connection.cursor() as cursor:
            cursor.execute(self._versions, parameters)
            text: str = cursor.fetchone()[0] or ""
        if time.monotonic() - self._since > READ_ALL_S:
            self._kept, self._last, self._since = {}, None, time.monotonic()
        last, known = self._last, self._kept
        if last is not None and last[0] == text:
            return dict(last[1])
        versions = text.split()
        new = {int(version.partition(":")[0]): version for version in versions if version not in known}
        kept = {version: known[version] for version in versions if version in known}
        if new:
            kept |= {new[row_id]: (row_id, row) for row_id, row in self._read(list(new)).items()}
        rows = dict(kept.values())
        complete = len(rows) == len(versions)
        self._kept, self._last = kept, (text, rows) if complete else None  # each at once: several threads may read
        return dict(rows)
