"""Plotly figures of metrics."""

from __future__ import annotations

from typing import Any

from oppo_client.html import escaped
from oppo_client.optional_deps import require
from oppo_client.run_base import RunBase
from oppo_client.tables import Table


def plot_metrics(run: RunBase, table: Table, x: str) -> Any:
    """A figure of columns over `x`; downsampled columns have a band of their extremes. Raises `MissingPackage`."""
    figure = require("plotly.graph_objects", "A plot").Figure()
    for key in (name for name in table if name not in ("step", x) and not name.endswith((" low", " high"))):
        if f"{key} low" in table:
            ends = {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
            figure.add_scatter(x=table[x], y=table[f"{key} low"], **ends)
            figure.add_scatter(x=table[x], y=table[f"{key} high"], fill="tonexty", fillcolor="rgba(120,120,120,.2)", **ends)
        figure.add_scatter(x=table[x], y=table[key], name=escaped(key), mode="lines")
    title = escaped(f"{run.name} (run {run.id})")  # Plotly interprets some HTML in titles
    figure.update_layout(title=title, xaxis_title=x, template="plotly_white")
    return figure
