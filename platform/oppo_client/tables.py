"""Columns with names: a pandas DataFrame where pandas is installed, and otherwise this plain mapping, which prints as a table."""

from __future__ import annotations

from typing import Any

from oppo_client.html import cell, table
from oppo_client.optional_deps import needed, optional

SHOWN_ROWS = 60
WIDEST = 48


class Table(dict[str, list[Any]]):
    """Columns of the same length by name, in order; what is not known is None, or NaN among numbers."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The same, a mapping a row."""
        return [dict(zip(self, values, strict=True)) for values in zip(*self.values(), strict=True)]

    def __repr__(self) -> str:
        count = max((len(column) for column in self.values()), default=0)
        columns = [[name, *(_short(cell(value)) for value in values[:SHOWN_ROWS])] for name, values in self.items()]
        wide = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, wide, strict=True)).rstrip()
            for row in zip(*columns, strict=True)
        ]
        more = [f"… {count - SHOWN_ROWS:,} rows more"] if count > SHOWN_ROWS else []
        return "\n".join([*lines, *more]) or "an empty table"

    def _repr_html_(self) -> str:
        return table(self, SHOWN_ROWS)


def framed(columns: Table, frame: bool | None) -> Any:
    """A DataFrame when pandas is installed; True: or `MissingPackage`; False: never."""
    if frame is False:
        return columns
    pandas = needed("pandas", "A DataFrame") if frame else optional("pandas")
    return columns if pandas is None else pandas.DataFrame(dict(columns))


def _short(text: str) -> str:
    # Control characters of names that others chose would move a terminal's cursor.
    text = "".join(c if c.isprintable() else "�" for c in text)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"
