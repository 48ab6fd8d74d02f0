"""Runs side by side, as `GET compare` tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oppo_client.html import badge, escaped
from oppo_client.optional_deps import needed
from oppo_client.series import joined
from oppo_client.tables import Table, framed

REWARD = "critic/score/mean"


class Comparison:
    """Curves, time to the target, speed-up against a baseline, differing settings, and figures.

    Attributes:
        told: the platform's reply, as docs/interfaces.md has it.
        target: the reward to reach, or None. baseline: the run that the others are measured against.
    """

    def __init__(self, told: Mapping[str, Any], x: str) -> None:
        self.told, self.x = told, x
        self.target: float | None = told["target"]
        self.baseline: int = told["baseline"]
        self.names: dict[int, str] = {run["id"]: run["name"] for run in told["runs"]}

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.names)} runs, baseline {self.baseline}, target {self.target}>"

    def table(self, frame: bool | None = None) -> Any:
        """A row a run: seconds to the target, speed-up against the baseline, figures, and every setting that differs.

        A DataFrame if pandas is installed, else a `Table`; `frame` True or False insists.
        """
        return framed(self._table(), frame)

    def _table(self) -> Table:
        columns: dict[str, list[Any]] = {"run": [], "name": [], "state": [], "reward": []}
        columns |= {name: [] for name in ("step_to_target", "s_to_target", "speedup", "s_per_step", "bubble", "wall_s")}
        columns |= {setting["path"]: [] for setting in self.told["config_diff"]}
        for run in self.told["runs"]:
            for name, value in self._row(run).items():
                columns[name].append(value)
        return Table(columns)

    def _row(self, run: Mapping[str, Any]) -> dict[str, Any]:
        key = str(run["id"])
        reached, figures = self.told["time_to_target"].get(key) or {}, self.told["figures"][key]
        return {
            "run": run["id"],
            "name": run["name"],
            "state": run["state"],
            "reward": figures["reward_last_tenth"],
            "step_to_target": reached.get("step"),
            "s_to_target": reached.get("elapsed_s"),
            "speedup": self.told["speedup"].get(key),
            "s_per_step": figures["step_s"],
            "bubble": figures["bubble"],
            "wall_s": figures["wall_s"],
            **{setting["path"]: setting["values"].get(key) for setting in self.told["config_diff"]},
        }

    def groups(self, frame: bool | None = None) -> Any:
        """A row a group, when `group` was asked for: how many of its runs reached the target, after how long on average, and its
        speed-up with a 90 % interval where both sides have two runs or more."""
        columns: dict[str, list[Any]] = {
            name: [] for name in ("group", "runs", "reached", "step_to_target", "s_to_target", "speedup", "low", "high")
        }
        for group in self.told["groups"]:
            ratio = group["speedup"] or {}
            row = (group["value"], len(group["runs"]), group["reached"], group["step"], group["elapsed_s"])
            for name, value in zip(columns, (*row, *(ratio.get(end) for end in ("mean", "low", "high"))), strict=True):
                columns[name].append(value)
        return framed(Table(columns), frame)

    def metrics(self, run: int, frame: bool | None = None) -> Any:
        """The fetched curves of one of the runs, as `Run.metrics` has them."""
        return framed(joined(self.told["series"][str(run)], self.x), frame)

    def plot(self, key: str = REWARD) -> Any:
        """A Plotly figure of one metric of all runs. Raises `MissingPackage`; `KeyError` for a metric that was not asked for."""
        graph = needed("plotly.graph_objects", "A plot")
        figure = graph.Figure()
        for run_id, name in self.names.items():
            columns = self.told["series"][str(run_id)][key]
            figure.add_scatter(x=columns["x"], y=columns["y"], name=f"{run_id} {escaped(name)}", mode="lines")
        if self.target is not None and key == REWARD:
            figure.add_hline(y=self.target, line_dash="dot", annotation_text="target")
        figure.update_layout(xaxis_title=self.x, yaxis_title=escaped(key), template="plotly_white")
        return figure

    def _repr_html_(self) -> str:
        head = f"baseline: run {self.baseline}" + (f" · target reward {self.target:g}" if self.target is not None else "")
        states = " ".join(f"{run['id']} {badge(run['state'])}" for run in self.told["runs"])
        return f"<p><small>{escaped(head)}</small><br>{states}</p>{self._table()._repr_html_()}"
