"""Figures of a trace under one planner, from waits and held devices.

available  = devices · (last submission − first submission), in GPU-seconds
used       = held GPU-seconds ÷ available; useful: held without lost work, restarts and stops
fragmented = free GPU-seconds while a gang (more than one device) waited that fits into the sum of the free devices
Jain       = see `fairness`
slowdown   = (end − submission) ÷ the run's own time, both at least `SLOWDOWN_BOUND_S`, so that short runs do not dominate
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Self

from oppo_bench.cluster.fairness import fairness
from oppo_bench.cluster.gaps import fragmented_gpu_s
from oppo_bench.cluster.simulation import Hold, Outcome
from oppo_bench.cluster.trace import Span, Submission, Trace, overlap

SLOWDOWN_BOUND_S = 600.0
WINDOW_S = 6 * 3600.0
SIZE_CLASSES = ((1, "1"), (8, "2–8"), (32, "9–32"), (10**9, "33 +"))


@dataclass(frozen=True, slots=True)
class Spread:
    """Summary of values; all 0 when there are none."""

    n: int
    mean: float
    median: float
    p95: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Summary of these values; p95 is the smallest value that 95 % do not exceed."""
        ordered = sorted(values)
        if not ordered:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
        return cls(len(ordered), fmean(ordered), median(ordered), p95, ordered[0], ordered[-1])


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one planner. Waits are a run's total time in the queue, seconds; shares are of 1."""

    wait: Spread
    wait_by_team: dict[str, Spread]
    wait_by_size: dict[str, Spread]
    slowdown: Spread
    utilization: float
    useful: float
    jain: float
    jain_windows: int
    preemptions: int
    preempted_most: int  # of the run that was preempted most often
    lost_gpu_s: float
    restart_gpu_s: float  # devices held while their run restarted or stopped
    fragmentation: float
    makespan_s: float
    ended: int
    refused: int
    stuck: int
    plans: int


def compute_figures(outcome: Outcome, window_s: float = WINDOW_S) -> Figures:
    """Figures of an outcome."""
    trace = outcome.trace
    waits = _waits(outcome)
    by_size = _grouped(waits, trace, _size_class)
    span: Span = (min((s.at_s for s in trace.submissions), default=0.0), trace.last_s)
    devices = sum(pool.nodes * pool.gpus for pool in trace.cluster.pools)
    available = max(1e-9, devices * (span[1] - span[0]))
    held = sum(len(h.devices) * overlap((h.start, h.end), span) for h in outcome.holds)
    vain = sum(_vain(h) * overlap((h.start, h.end), span) / max(1e-9, h.end - h.start) for h in outcome.holds)
    jain, windows = fairness(outcome, span, window_s)
    stops = Counter(h.run_id for h in outcome.holds if h.preempted)
    return Figures(
        wait=Spread.of(waits.values()),
        wait_by_team=_grouped(waits, trace, _team),
        wait_by_size={name: by_size[name] for _, name in SIZE_CLASSES if name in by_size},
        slowdown=Spread.of(_slowdown(trace, run_id, end) for run_id, end in outcome.ends.items()),
        utilization=held / available,
        useful=(held - vain) / available,
        jain=jain,
        jain_windows=windows,
        preemptions=sum(stops.values()),
        preempted_most=max(stops.values(), default=0),
        lost_gpu_s=sum(len(h.devices) * h.lost_s for h in outcome.holds),
        restart_gpu_s=sum(len(h.devices) * h.idle_s for h in outcome.holds),
        fragmentation=fragmented_gpu_s(outcome, span) / available,
        makespan_s=max(outcome.ends.values(), default=span[0]) - span[0],
        ended=len(outcome.ends),
        refused=len(outcome.refused),
        stuck=len(outcome.stuck),
        plans=outcome.plans,
    )


def _vain(hold: Hold) -> float:
    return len(hold.devices) * (hold.lost_s + hold.idle_s)


def _waits(outcome: Outcome) -> dict[int, float]:
    """Total seconds in the queue by run."""
    waits: dict[int, float] = defaultdict(float)
    for wait in outcome.waits:
        waits[wait.run_id] += wait.end - wait.start
    return waits


def _grouped(waits: Mapping[int, float], trace: Trace, group: Callable[[Submission], str]) -> dict[str, Spread]:
    groups: dict[str, list[float]] = defaultdict(list)
    for run_id, wait in waits.items():
        groups[group(trace.submissions[run_id - 1])].append(wait)
    return {name: Spread.of(values) for name, values in sorted(groups.items())}


def _team(submission: Submission) -> str:
    return submission.team


def _size_class(submission: Submission) -> str:
    return next(name for most, name in SIZE_CLASSES if submission.devices <= most)


def _slowdown(trace: Trace, run_id: int, end: float) -> float:
    submission = trace.submissions[run_id - 1]
    return max(SLOWDOWN_BOUND_S, end - submission.at_s) / max(SLOWDOWN_BOUND_S, submission.work_s)
