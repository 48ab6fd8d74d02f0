"""HTML for notebooks: badge, progress bar, sparkline, table. Values from outside must pass through `escaped`."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = {
    "running": "#2f7ed8",
    "succeeded": "#2a9d5c",
    "failed": "#c8453b",
    "cancelled": "#777777",
    "paused": "#b07d10",
    "queued": "#777777",
}
WIDTH, HEIGHT = 160, 28


def escaped(value: object) -> str:
    """A value as HTML text."""
    return html.escape(str(value), quote=True)


def badge(state: str) -> str:
    """Badge of a run's state."""
    colour = COLOURS.get(state, "#b07d10")
    style = f"background:{colour};color:#fff;border-radius:4px;padding:1px 7px;font-size:90%"
    return f'<span style="{style}">{escaped(state)}</span>'


def bar(share: float, label: str) -> str:
    """Progress bar, filled to a share between 0 and 1."""
    filled = round(100 * min(1.0, max(0.0, share)), 1)
    return (
        '<span style="display:inline-block;width:160px;height:8px;background:rgba(128,128,128,.25);border-radius:4px">'
        f'<span style="display:block;width:{filled}%;height:8px;background:#2f7ed8;border-radius:4px"></span></span>'
        f" <small>{escaped(label)}</small>"
    )


def sparkline(values: Sequence[float | None], label: str) -> str:
    """A small line chart that skips missing and non-finite values. Empty with fewer than two values."""
    points = [(i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    if len(points) < 2:
        return ""
    low, high = min(v for _, v in points), max(v for _, v in points)
    span = (high - low) or 1.0
    coordinates = " ".join(
        f"{WIDTH * i / (len(values) - 1):.1f},{2 + (HEIGHT - 4) * (1 - (v - low) / span):.1f}" for i, v in points
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escaped(label)}" style="vertical-align:middle">'
        f'<polyline points="{coordinates}" fill="none" stroke="#2f7ed8" stroke-width="1.5"/></svg>'
    )


def table(columns: Mapping[str, Sequence[Any]], max_rows: int) -> str:
    """A table of the first `max_rows` rows of columns of equal length."""
    count = max((len(column) for column in columns.values()), default=0)
    head = "".join(f"<th>{escaped(name)}</th>" for name in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escaped(cell(column[i]))}</td>" for column in columns.values()) + "</tr>"
        for i in range(min(count, max_rows))
    )
    more = f"<small>{count - max_rows:,} rows more</small>" if count > max_rows else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def cell(value: Any) -> str:
    """A value formatted for a table cell."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.5g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def duration(seconds: float | None) -> str:
    """Formatted seconds: `42 s`, `3 min 05 s`, `2 h 10 min`; empty if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    rounded = max(0, round(seconds))
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02} min"
