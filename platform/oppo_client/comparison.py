"""`Comparison`: the result of `GET compare` as tables and plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oppo_client.html import badge, escaped
from oppo_client.optional_deps import require
from oppo_client.run_base import REWARD
from oppo_client.series import join_series
from oppo_client.tables import Table, to_frame


class Comparison:
    """Curves, time to target, speed-up over the baseline, and differing settings of runs.

    Attributes:
        data: the platform's reply (docs/interfaces.md).
        target: the target reward, or None. baseline: number of the baseline run.
    """

    def __init__(self, data: Mapping[str, Any], x: str) -> None:
        self.data, self.x = data, x
        self.target: float | None = data["target"]
        self.baseline: int = data["baseline"]
        self.names: dict[int, str] = {run["id"]: run["name"] for run in data["runs"]}

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.names)} runs, baseline {self.baseline}, target {self.target}>"

    def table(self, frame: bool | None = None) -> Any:
        """One row per run: seconds to the target, speed-up over the baseline, statistics, and every setting that differs.

        `frame`: as in `Run.metrics`.
        """
        return to_frame(self._table(), frame)

    def _table(self) -> Table:
        columns: dict[str, list[Any]] = {"run": [], "name": [], "state": [], "reward": []}
        columns |= {name: [] for name in ("step_to_target", "s_to_target", "speedup", "s_per_step", "bubble", "wall_s")}
        columns |= {setting["path"]: [] for setting in self.data["config_diff"]}
        for run in self.data["runs"]:
            for name, value in self._row(run).items():
                columns[name].append(value)
        return Table(columns)

    def _row(self, run: Mapping[str, Any]) -> dict[str, Any]:
        key = str(run["id"])
        reached, figures = self.data["time_to_target"].get(key) or {}, self.data["figures"][key]
        return {
            "run": run["id"],
            "name": run["name"],
            "state": run["state"],
            "reward": figures["reward_last_tenth"],
            "step_to_target": reached.get("step"),
            "s_to_target": reached.get("elapsed_s"),
            "speedup": self.data["speedup"].get(key),
            "s_per_step": figures["step_s"],
            "bubble": figures["bubble"],
            "wall_s": figures["wall_s"],
            **{setting["path"]: setting["values"].get(key) for setting in self.data["config_diff"]},
        }

    def groups(self, frame: bool | None = None) -> Any:
        """One row per group (with `group`): runs that reached the target, mean time to it, speed-up. The speed-up has a 90 %
        interval if both groups have at least two runs."""
        columns: dict[str, list[Any]] = {
            name: [] for name in ("group", "runs", "reached", "step_to_target", "s_to_target", "speedup", "low", "high")
        }
        for group in self.data["groups"]:
            ratio = group["speedup"] or {}
            row = (group["value"], len(group["runs"]), group["reached"], group["step"], group["elapsed_s"])
            for name, value in zip(columns, (*row, *(ratio.get(end) for end in ("mean", "low", "high"))), strict=True):
                columns[name].append(value)
        return to_frame(Table(columns), frame)

    def metrics(self, run: int, frame: bool | None = None) -> Any:
        """The fetched curves of one run, as `Run.metrics` returns them."""
        return to_frame(join_series(self.data["series"][str(run)], self.x), frame)

    def plot(self, key: str = REWARD) -> Any:
        """A Plotly figure of one metric of all runs. Raises `MissingPackage`; `KeyError` for a metric that was not fetched."""
        graph = require("plotly.graph_objects", "A plot")
        figure = graph.Figure()
        for run_id, name in self.names.items():
            columns = self.data["series"][str(run_id)][key]
            figure.add_scatter(x=columns["x"], y=columns["y"], name=f"{run_id} {escaped(name)}", mode="lines")
        if self.target is not None and key == REWARD:
            figure.add_hline(y=self.target, line_dash="dot", annotation_text="target")
        figure.update_layout(xaxis_title=self.x, yaxis_title=escaped(key), template="plotly_white")
        return figure

    def _repr_html_(self) -> str:
        head = f"baseline: run {self.baseline}" + (f" · target reward {self.target:g}" if self.target is not None else "")
        states = " ".join(f"{run['id']} {badge(run['state'])}" for run in self.data["runs"])
        return f"<p><small>{escaped(head)}</small><br>{states}</p>{self._table()._repr_html_()}"
