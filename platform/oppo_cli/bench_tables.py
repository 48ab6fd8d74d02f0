"""Figures of a bench as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oppo_bench.document import Result


def show(title: str, results: list[Result]) -> None:
    """Print them: median (or what the name says), least, most, repetitions."""
    from rich.table import Table

    from oppo_bench.tables import console

    table = Table(title=title, title_justify="left")
    for column in ("figure", "median", "min", "max", "n"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for r in results:
        shown = (
            f"{figure:,.3f}" if r.unit != "ms" and abs(figure) < 100 else f"{figure:,.1f}" for figure in (r.median, r.min, r.max)
        )
        table.add_row(f"{r.name} [{r.unit}]", *shown, str(r.n))
    console().print(table)
