"""Groups of runs that share a setting, and speed-ups between groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from typing_extensions import TypedDict

BUT_SEED = "-seed"  # special grouping key: runs that differ only in name and seed
ABSENT = "–"
LEVEL = 0.9
RESAMPLES, BOOTSTRAP_SEED = 2000, 17

Settings = Mapping[int, Mapping[str, str]]  # run id → path → text


class Ratio(TypedDict):
    """A ratio of two means; `low` and `high` bound its 90 % interval, None if one side has fewer than two runs."""

    mean: float
    low: float | None
    high: float | None


class Group(TypedDict):
    """Runs of one value, and when they reached the target: means over those that did (`reached` of them)."""

    value: str
    runs: list[int]
    reached: int
    step: float | None
    elapsed_s: float | None
    speedup: Ratio | None


def differing(settings: Settings) -> dict[str, dict[int, str]]:
    """By path, the values of every setting that differs between runs, without names."""
    paths = dict.fromkeys(path for leaves in settings.values() for path in leaves)
    values = {path: {run_id: leaves.get(path, ABSENT) for run_id, leaves in settings.items()} for path in paths}
    return {path: result for path, result in values.items() if path != "name" and len(set(result.values())) > 1}


def grouped(settings: Settings, by: str) -> dict[str, list[int]]:
    """Run ids by their value of the setting `by`, in the order of the runs; `-seed` groups by all other settings that differ."""
    paths = [path for path in differing(settings) if path != "seed"] if by == BUT_SEED else [by]
    ends = [path.rpartition(".")[2] for path in paths]
    # `run` and `step` alone are ambiguous: for forks the label has the whole path.
    short = [ends.count(end) == 1 and not path.startswith("fork.") for path, end in zip(paths, ends, strict=True)]
    names = [end if enough else path for path, end, enough in zip(paths, ends, short, strict=True)]
    result: dict[str, list[int]] = {}
    for run_id, leaves in settings.items():
        values = [leaves.get(path, ABSENT) for path in paths]
        labels = values if len(paths) == 1 else [f"{name} {value}" for name, value in zip(names, values, strict=True)]
        result.setdefault(", ".join(labels) or "all runs", []).append(run_id)
    return result


def speedup(baseline: Sequence[float | None], own: Sequence[float | None]) -> Ratio | None:
    """Mean of the baseline's times ÷ mean of the group's; None if one has no time above zero. Unknown times are left out.

    The interval is a percentile bootstrap: both sides are resampled independently with a fixed seed, so that the same times
    give the same interval in any order.
    """
    slow, fast = (np.sort(np.asarray([time for time in times if time], float)) for times in (baseline, own))
    if not len(slow) or not len(fast) or slow[0] <= 0 or fast[0] <= 0:
        return None
    mean = float(slow.mean() / fast.mean())
    if min(len(slow), len(fast)) < 2:
        return Ratio(mean=mean, low=None, high=None)
    draw = np.random.default_rng(BOOTSTRAP_SEED)
    means = [side[draw.integers(0, len(side), (RESAMPLES, len(side)))].mean(axis=1) for side in (slow, fast)]
    low, high = np.quantile(means[0] / means[1], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Ratio(mean=mean, low=float(low), high=float(high))


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
