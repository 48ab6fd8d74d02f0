"""Runs that share a setting taken together, and how much faster one group is than another. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from typing_extensions import TypedDict

BUT_SEED = "-seed"  # instead of a path: runs that differ in nothing but name and seed
ABSENT = "–"
LEVEL = 0.9
RESAMPLES, BOOTSTRAP_SEED = 2000, 17

Settings = Mapping[int, Mapping[str, str]]  # run id → path → text


class Ratio(TypedDict):
    """A ratio of two means; `low` and `high` bound its 90 % interval, None where one side has fewer than two runs."""

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
    """By path, what each run has there, of the settings in which they are not all alike; names left out."""
    paths = dict.fromkeys(path for leaves in settings.values() for path in leaves)
    values = {path: {run_id: leaves.get(path, ABSENT) for run_id, leaves in settings.items()} for path in paths}
    return {path: found for path, found in values.items() if path != "name" and len(set(found.values())) > 1}


def grouped(settings: Settings, by: str) -> dict[str, list[int]]:
    """Run ids by what they have at the path `by`, in the order of the runs; `-seed` groups by everything else that differs."""
    paths = [path for path in differing(settings) if path != "seed"] if by == BUT_SEED else [by]
    ends = [path.rpartition(".")[2] for path in paths]
    # `run` and `step` alone would be anything: of a fork the whole path says more.
    short = [ends.count(end) == 1 and not path.startswith("fork.") for path, end in zip(paths, ends, strict=True)]
    names = [end if enough else path for path, end, enough in zip(paths, ends, short, strict=True)]
    found: dict[str, list[int]] = {}
    for run_id, leaves in settings.items():
        values = [leaves.get(path, ABSENT) for path in paths]
        told = values if len(paths) == 1 else [f"{name} {value}" for name, value in zip(names, values, strict=True)]
        found.setdefault(", ".join(told) or "all runs", []).append(run_id)
    return found


def speedup(baseline: Sequence[float], own: Sequence[float]) -> Ratio | None:
    """The mean of the baseline's times divided by the mean of one's own; None where one of them has no time above zero.

    The interval is a percentile bootstrap: both sides are drawn again with replacement, independently and with a fixed seed, so
    that the same times always give the same interval, in whatever order they come.
    """
    slow, fast = np.sort(np.asarray(baseline, float)), np.sort(np.asarray(own, float))
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
    """Of the known ones; None when there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
