"""What every device did in some steps, and the figure of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oppo_client.optional_deps import needed
from oppo_client.tables import Table


class Timeline:
    """Some steps of a run's timeline.

    Attributes:
        figure_json: `{"data", "layout"}`, a Plotly figure as the platform draws it.
        told: `GET runs/{id}/timeline` of the same steps: lanes, steps with their spans, the worst bubbles.
    """

    def __init__(self, run_id: int, told: Mapping[str, Any], figure_json: Mapping[str, Any]) -> None:
        self.run_id, self.told, self.figure_json = run_id, told, figure_json

    @property
    def steps(self) -> list[int]:
        """The steps that it holds."""
        return [int(step["step"]) for step in self.told["steps"]]

    @property
    def worst(self) -> Table:
        """The longest bubbles, each with device, cause, step, seconds, and what it was in words."""
        names = ("device", "cause", "step", "start_s", "length_s", "words")
        return Table({name: [bubble[name] for bubble in self.told["worst"]] for name in names})

    def figure(self) -> Any:
        """A `plotly.graph_objects.Figure`. Raises `MissingPackage`."""
        return needed("plotly.graph_objects", "A figure").Figure(dict(self.figure_json))

    def show(self) -> None:
        """Draw it: in the notebook, or in a browser. Raises `MissingPackage`."""
        self.figure().show()

    def __repr__(self) -> str:
        steps = self.steps
        told = f"steps {steps[0]} to {steps[-1]}" if steps else "no recorded steps"
        return f"<Timeline of run {self.run_id}: {told}, {len(self.told['lanes'])} lanes>"

    def _repr_html_(self) -> str:
        head = f"Timeline of run {int(self.run_id)}; <code>.show()</code> draws it. Longest gaps:"
        return f"<p>{head}</p>{self.worst._repr_html_()}"
