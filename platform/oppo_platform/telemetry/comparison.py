"""Runs side by side: curves, time to a target reward, speed-up, differing configuration, and a few figures each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from oppo_platform.runs.models import Run
from oppo_platform.runs.selectors import run_summary
from oppo_platform.telemetry.selectors import Axis, Reign, axis_values, metrics, reigns, series_points

REWARD = "critic/score/mean"
EMA_ALPHA = 0.1
ABSENT = "–"


def compare(runs: Sequence[Run], keys: Sequence[str], x: Axis, target: float | None = None) -> dict[str, Any]:
    """Everything the compare page shows (docs/interfaces.md, `GET compare`); the first run is the baseline.

    `target` defaults to the first `budget.target_reward` found. `speedup` is the baseline's time to the target divided by the
    run's own; without a target it is the same ratio of mean seconds a step. None where one of the two is unknown.
    """
    parts = {run.pk: reigns(run) for run in runs}
    goal = target if target is not None else next((r.target_reward for r in runs if r.target_reward is not None), None)
    reached = {run.pk: time_to_target(parts[run.pk], goal) for run in runs}
    told = {run.pk: figures(run, parts[run.pk]) for run in runs}
    pace = {run_id: (reached[run_id] or {}).get("elapsed_s") if goal is not None else told[run_id]["step_s"] for run_id in parts}
    first = pace[runs[0].pk] if runs else None
    return {
        "runs": [run_summary(run) for run in runs],
        "series": {str(run.pk): metrics(run, keys, x)["series"] for run in runs},
        "target": goal,
        "time_to_target": {str(run_id): value for run_id, value in reached.items()},
        "speedup": {str(run_id): first / own if first and own else None for run_id, own in pace.items()},
        "config_diff": config_diff(runs),
        "figures": {str(run_id): value for run_id, value in told.items()},
    }


def time_to_target(parts: Sequence[Reign], target: float | None) -> dict[str, float | None] | None:
    """`{step, elapsed_s}` of the first step at which the smoothed reward reaches the target; None when it never does.

    Smoothed: m₁ = y₁, mₜ = 0.1·yₜ + 0.9·mₜ₋₁ over `critic/score/mean` in full resolution, non-finite values left out. A
    single lucky batch does not count as having reached the target.
    """
    if target is None:
        return None
    mean: float | None = None
    for step, value in series_points(parts, REWARD).items():
        if not math.isfinite(value):
            continue
        mean = value if mean is None else EMA_ALPHA * value + (1 - EMA_ALPHA) * mean
        if mean >= target:
            return {"step": step, "elapsed_s": axis_values(parts, "wall", step - 1).get(step)}
    return None


def figures(run: Run, parts: Sequence[Reign]) -> dict[str, float | None]:
    """`{step_s, bubble, occupancy, reward_last_tenth, wall_s, deferred_share}` of a run.

    Means over steps, leaving out the first `max_age` + 1, while the pool fills: seconds a step, bubble share over all devices,
    rows that decode ÷ rows in flight, share of deferred tokens; mean reward over the last tenth of the steps; training
    seconds in all.
    """
    warm = run.spec["overlap"]["max_age"] + 1
    bubbles = [key for key in run.latest if key.startswith("bubble/")]
    reward = list(series_points(parts, REWARD).values())
    return {
        "step_s": _mean(series_points(parts, "timing_s/step", warm).values()),
        "bubble": _mean(value for key in bubbles for value in series_points(parts, key, warm).values()),
        "occupancy": _mean(series_points(parts, "decode_occupancy", warm).values()),
        "reward_last_tenth": _mean(reward[-max(1, len(reward) // 10) :]),
        "wall_s": run.elapsed_s or None,
        "deferred_share": _mean(series_points(parts, "oppo/deferred_token_share", warm).values()),
    }


def _mean(values: Iterable[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return fmean(known) if known else None


def config_diff(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The settings in which the runs differ: `{path, values: {run id: text}}`, in the order of the spec; names left out."""
    flat = {run.pk: dict(_leaves(run.spec)) for run in runs}
    paths = dict.fromkeys(path for leaves in flat.values() for path in leaves)
    found = []
    for path in paths:
        values = {run_id: leaves.get(path, ABSENT) for run_id, leaves in flat.items()}
        if path != "name" and len(set(values.values())) > 1:
            found.append({"path": path, "values": {str(run_id): text for run_id, text in values.items()}})
    return found


def _leaves(data: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}.")
        elif value is not None:
            yield path, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
