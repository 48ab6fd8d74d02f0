"""`Timeline`: device timeline of some steps, and its figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oppo_client.optional_deps import require
from oppo_client.tables import Table


class Timeline:
    """Device timeline of some steps of a run.

    Attributes:
        figure_json: `{"data", "layout"}`, the platform's Plotly figure.
        data: `GET runs/{id}/timeline` of the same steps: lanes, steps with their spans, the worst bubbles.
    """

    def __init__(self, run_id: int, data: Mapping[str, Any], figure_json: Mapping[str, Any]) -> None:
        self.run_id, self.data, self.figure_json = run_id, data, figure_json

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps."""
        return [int(step["step"]) for step in self.data["steps"]]

    @property
    def worst(self) -> Table:
        """The longest bubbles: device, cause, step, seconds, and a description."""
        names = ("device", "cause", "step", "start_s", "length_s", "words")
        return Table({name: [bubble[name] for bubble in self.data["worst"]] for name in names})

    def figure(self) -> Any:
        """A `plotly.graph_objects.Figure`. Raises `MissingPackage`."""
        return require("plotly.graph_objects", "A figure").Figure(dict(self.figure_json))

    def show(self) -> None:
        """Display the figure in the notebook or a browser. Raises `MissingPackage`."""
        self.figure().show()

    def __repr__(self) -> str:
        steps = self.steps
        shown = f"steps {steps[0]} to {steps[-1]}" if steps else "no recorded steps"
        return f"<Timeline of run {self.run_id}: {shown}, {len(self.data['lanes'])} lanes>"

    def _repr_html_(self) -> str:
        head = f"Timeline of run {int(self.run_id)}; <code>.show()</code> draws it. Longest gaps:"
        return f"<p>{head}</p>{self.worst._repr_html_()}"
