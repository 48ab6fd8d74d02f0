"""Comparison of runs: curves, time to a target reward, speed-up, differing configuration, and a few figures each."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oppo_contract.retired import drop_unused_settings
from oppo_contract.spec_errors import nearest_match
from oppo_platform.runs.models import Run
from oppo_platform.runs.selectors import compared_run
from oppo_platform.telemetry.blocks import Buckets, Values, merge_every
from oppo_platform.telemetry.grouping import BUT_SEED, Group, Settings, differing, grouped, mean, speedup
from oppo_platform.telemetry.metric_reader import Name, Parts, Points, Range, attempt_ranges_by_run, read_buckets, read_points
from oppo_platform.telemetry.metric_writer import Axis
from oppo_platform.telemetry.selectors import columns, expand_keys

REWARD = "critic/score/mean"
EMA_ALPHA = 0.1
GROUP, SMALLEST = 64, -17  # points at a time; the power of ten below which a number is negligible
MEANS = {"step_s": "timing_s/step", "occupancy": "decode_occupancy", "deferred_share": "oppo/deferred_token_share"}
Reached = dict[str, float | None] | None


class UnknownSetting(ValueError):
    """No compared run has the setting by which they should be grouped."""


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Settings of a comparison.

    `target`: the reward to reach; default: the first `budget.target_reward` of the runs. `baseline`: a run's id; default: the
    first run pinned in its project, or else the first one; its whole group when `group`, a path of the spec or `-seed`, groups
    runs. `counted`: include the smoothed reward by which the target counts as reached.
    """

    target: float | None = None
    baseline: int | None = None
    group: str = ""
    counted: bool = False


def compare(
    runs: Sequence[Run], keys: Sequence[str], x: Axis, max_points: int = 1000, view: CompareOptions | None = None
) -> dict[str, Any]:
    """All data of the compare page (`GET compare`; docs/comparing.md).

    `speedup` is the baseline's time to the target ÷ the run's own; without a target the same ratio of mean seconds per step.
    None if one of the two is unknown.

    Raises:
        ValueError: the baseline is none of the runs. UnknownSetting: none of them has the setting `view.group`.
    """
    view = view or CompareOptions()
    parts = attempt_ranges_by_run(runs)
    goal = view.target if view.target is not None else next((r.target_reward for r in runs if r.target_reward is not None), None)
    rewards = {run_id: values for (run_id, _), values in read_points(parts, [REWARD]).items()}
    reached = times_to_target(parts, rewards, goal)
    figures_by_run = figures(runs, parts, rewards)
    pace = {
        run_id: (reached[run_id] or {}).get("elapsed_s") if goal is not None else figures_by_run[run_id]["step_s"]
        for run_id in parts
    }
    settings = {run.pk: dict(_leaves(drop_unused_settings(run.spec))) for run in runs}
    _require_setting(view.group, settings.values())
    groups = grouped(settings, view.group) if view.group else {}
    baseline = _baseline(runs, view.baseline)
    slow = [pace[run_id] for run_id in next((ids for ids in groups.values() if baseline in ids), [baseline])]
    series = columns(parts, {run.pk: expand_keys(run, keys) for run in runs}, x, max_points)
    return {
        "runs": [compared_run(run) for run in runs],
        "metrics": sorted({name for run in runs for name in run.latest}),
        "series": {str(run_id): result for run_id, result in series.items()},
        "target": goal,
        "time_to_target": {str(run_id): value for run_id, value in reached.items()},
        "baseline": baseline,
        "speedup": {str(run_id): ratio["mean"] if (ratio := speedup(slow, [own])) else None for run_id, own in pace.items()},
        "groups": [_group(value, ids, reached, slow, pace) for value, ids in groups.items()],
        "config_diff": config_diff(settings),
        "figures": {str(run_id): value for run_id, value in figures_by_run.items()},
        "counted": {str(i): counted(rewards.get(i), series[i], reached[i]) for i in parts} if view.counted else {},
    }


def _require_setting(path: str, settings: Collection[Settings]) -> None:
    if path not in ("", BUT_SEED) and not any(path in leaves for leaves in settings):
        near = nearest_match(path, sorted({known for leaves in settings for known in leaves}))
        raise UnknownSetting(f"No compared run has the setting {path}{f'; did you mean {near}?' if near else '.'}")


def counted(points: Points | None, series: Mapping[str, Mapping[str, Any]], hit: Reached) -> list[float | None]:
    """The smoothed reward at the rows of the reward's series, each of which represents the steps up to its own.

    The row with the step that reached the target has that step's value, so that the chart shows the crossing.
    """
    rows = series.get(REWARD)
    if rows is None or points is None:
        return []
    known, means = _smoothed_points(points)
    at = np.searchsorted(known, rows["step"], side="right") - 1
    result: list[float | None] = [float(means[i]) if i >= 0 else None for i in at]
    if hit is not None:
        row = int(np.searchsorted(rows["step"], hit["step"]))
        if row < len(result):
            result[row] = float(means[np.searchsorted(known, hit["step"])])
    return result


def _baseline(runs: Sequence[Run], requested: int | None) -> int:
    ids = [run.pk for run in runs]
    if requested is not None and requested not in ids:
        raise ValueError("The baseline must be one of the compared runs.")
    pinned = next((run.pk for run in runs if run.project.pinned_id == run.pk), ids[0])
    return pinned if requested is None else requested


def _group(
    value: str, ids: list[int], reached: Mapping[int, Reached], slow: Sequence[float | None], pace: Mapping[int, float | None]
) -> Group:
    hits = [hit for run_id in ids if (hit := reached[run_id])]
    return Group(
        value=value,
        runs=ids,
        reached=len(hits),
        step=mean([hit["step"] for hit in hits]),
        elapsed_s=mean([hit["elapsed_s"] for hit in hits]),
        speedup=speedup(slow, [pace[run_id] for run_id in ids]),
    )


def times_to_target(parts: Parts, rewards: Mapping[int, Points], target: float | None) -> dict[int, Reached]:
    """By run, `{step, elapsed_s}` of the first step at which the smoothed reward reaches the target; None if it never does.

    Smoothed: m₁ = y₁, mₜ = 0.1·yₜ + 0.9·mₜ₋₁ over `critic/score/mean` in full resolution, without non-finite values. A
    single lucky batch does not count.
    """
    steps = {run_id: step for run_id, points in rewards.items() if (step := _reached_at(points, target)) is not None}
    walls = read_points({run_id: parts[run_id] for run_id in steps}, ["@wall"], {i: Range(s - 1, s) for i, s in steps.items()})
    elapsed = {run_id: float(values[-1]) for (run_id, _), (_, values) in walls.items()}
    return {i: {"step": steps[i], "elapsed_s": elapsed.get(i)} if i in steps else None for i in parts}


def _reached_at(points: Points, target: float | None) -> int | None:
    if target is None:
        return None
    steps, means = _smoothed_points(points)
    reached = np.flatnonzero(means >= target)
    return int(steps[reached[0]]) if len(reached) else None


def _smoothed_points(points: Points) -> Points:
    """The steps with a finite value, and their exponential averages."""
    steps, values = points
    finite = np.isfinite(values)
    return steps[finite], smoothed(values[finite], EMA_ALPHA) if finite.any() else values[:0]


def smoothed(values: Values, alpha: float) -> Values:
    """m₁ = y₁, mₜ = α·yₜ + (1−α)·mₜ₋₁, in groups of 64: each group's own contribution plus the decayed mean before it."""
    decay, groups = 1.0 - alpha, -(-len(values) // GROUP)
    padded = np.zeros(groups * GROUP)
    padded[: len(values)] = values
    shrinking = decay ** np.arange(GROUP)
    own = alpha * shrinking * np.cumsum(padded.reshape(groups, GROUP) / shrinking, axis=1)
    # A group's contribution decays by decay^64 per group; the first mean is the first value.
    ends = np.concatenate([values[:1], own[:-1, -1]])
    before = np.convolve(ends, decay ** (GROUP * np.arange(1 + int(SMALLEST / (GROUP * np.log10(decay))))))[:groups]
    return (own + np.outer(before, decay * shrinking)).ravel()[: len(values)]


def figures(runs: Sequence[Run], parts: Parts, rewards: Mapping[int, Points]) -> dict[int, dict[str, float | None]]:
    """By run, `{step_s, bubble, occupancy, reward_last_tenth, wall_s, deferred_share}`.

    Means over steps without the first `max_age` + 1, in which the pool fills: seconds per step, bubble share over all devices,
    decoding rows ÷ rows in flight, share of deferred tokens; mean reward over the last tenth of the steps; total training
    seconds.
    """
    warm = {run.pk: Range(run.spec["overlap"]["max_age"] + 1) for run in runs}
    bubbles = {run.pk: expand_keys(run, ["bubble/*"]) for run in runs}
    buckets = read_buckets(parts, {*MEANS.values(), *(key for keys in bubbles.values() for key in keys)}, warm, most=1)
    return {
        run.pk: {
            **{name: _mean(buckets, run.pk, [key]) for name, key in MEANS.items()},
            "bubble": _mean(buckets, run.pk, bubbles[run.pk]),
            "reward_last_tenth": _last_tenth(rewards.get(run.pk)),
            "wall_s": run.elapsed_s or None,
        }
        for run in runs
    }


def _mean(buckets: Mapping[Name, Buckets], run_id: int, keys: Iterable[str]) -> float | None:
    """Mean of the finite points of several series."""
    whole = [buckets[run_id, key][:1] for key in keys if (run_id, key) in buckets]
    value = float(merge_every(np.concatenate(whole), len(whole))["mean"][0]) if whole else math.nan
    return value if math.isfinite(value) else None


def _last_tenth(points: Points | None) -> float | None:
    if points is None:
        return None
    values = points[1][-max(1, len(points[1]) // 10) :]
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def config_diff(settings: Settings) -> list[dict[str, Any]]:
    """Settings in which the runs differ: `{path, values: {run id: text}}`, in the order of the spec, without names."""
    return [
        {"path": path, "values": {str(run_id): text for run_id, text in values.items()}}
        for path, values in differing(settings).items()
    ]


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
    if isinstance(value, float):
        return repr(float(f"{value:.12g}"))  # 5e-06, also if it was computed as 4.9999999999999996e-06
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)
