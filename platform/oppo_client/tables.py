"""`Table`: named columns, used where pandas is not installed."""

from __future__ import annotations

from typing import Any

from oppo_client.html import cell, table
from oppo_client.optional_deps import import_optional, require

MAX_ROWS = 60
MAX_WIDTH = 48


class Table(dict[str, list[Any]]):
    """Columns of equal length by name; missing values are None, or NaN in numeric columns. Prints as a table."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One mapping per row."""
        return [dict(zip(self, values, strict=True)) for values in zip(*self.values(), strict=True)]

    def __repr__(self) -> str:
        count = max((len(column) for column in self.values()), default=0)
        columns = [[name, *(_truncate(cell(value)) for value in values[:MAX_ROWS])] for name, values in self.items()]
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in zip(*columns, strict=True)
        ]
        more = [f"… {count - MAX_ROWS:,} rows more"] if count > MAX_ROWS else []
        return "\n".join([*lines, *more]) or "an empty table"

    def _repr_html_(self) -> str:
        return table(self, MAX_ROWS)


def to_frame(columns: Table, frame: bool | None) -> Any:
    """True: a DataFrame or `MissingPackage`; False: the table; None: a DataFrame if pandas is installed."""
    if frame is False:
        return columns
    pandas = require("pandas", "A DataFrame") if frame else import_optional("pandas")
    return columns if pandas is None else pandas.DataFrame(dict(columns))


def _truncate(text: str) -> str:
    # Control characters would move a terminal's cursor.
    text = "".join(c if c.isprintable() else "�" for c in text)
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 1] + "…"
