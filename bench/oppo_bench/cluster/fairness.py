"""Jain's index of the teams' GPU-seconds, by windows of time.

In a window team t has demand d = GPU-seconds that its runs held or waited for. It is entitled to the weighted max-min fair share
of the capacity: at most d, and equal per unit of weight for all teams below their demand. With x = held ÷ entitled and n teams
with demand, J = (Σx)² ÷ (n · Σx²): 1 if all teams got the same part of their entitlement, 1/n if one team got everything.
A window counts if two teams or more had demand and total demand exceeded the capacity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from oppo_bench.cluster.simulation import Outcome
from oppo_bench.cluster.trace import Span, overlap

Windows = list[dict[str, float]]  # GPU-seconds by team, window by window


def fairness(outcome: Outcome, span: Span, window_s: float) -> tuple[float, int]:
    """Mean index over the windows of the span that count, and their number (none: 1.0)."""
    trace = outcome.trace
    windows = [(start, min(start + window_s, span[1])) for start in _starts(span, window_s)]
    asked = {number: (s.team, s.devices) for number, s in enumerate(trace.submissions, 1)}
    held = _by_window([(*asked[h.run_id], h.start, h.end) for h in outcome.holds], windows, window_s, span)
    wanted = _by_window([(*asked[w.run_id], w.start, w.end) for w in outcome.waits], windows, window_s, span)
    weights = {team.name: team.weight for team in trace.cluster.teams}
    devices = sum(pool.nodes * pool.gpus for pool in trace.cluster.pools)
    found = []
    for window, has, lacks in zip(windows, held, wanted, strict=True):
        demand = {team: has.get(team, 0.0) + lacks.get(team, 0.0) for team in weights}
        demand = {team: gpu_s for team, gpu_s in demand.items() if gpu_s > 0}
        available = devices * (window[1] - window[0])
        if len(demand) > 1 and sum(demand.values()) > available > 0:
            fair = entitled(available, demand, weights)
            found.append(jain([has.get(team, 0.0) / fair[team] for team in demand]))
    return (fmean(found) if found else 1.0), len(found)


def jain(values: Sequence[float]) -> float:
    """Jain's index of values of which at least one is positive."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def entitled(available: float, demand: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Weighted max-min fair division: by rising demand per weight, each team gets its demand or its share of the remainder."""
    shares: dict[str, float] = {}
    weight, left = sum(weights[team] for team in demand), available
    for team in sorted(demand, key=lambda name: (demand[name] / weights[name], name)):
        shares[team] = min(demand[team], left * weights[team] / weight)
        left -= shares[team]
        weight -= weights[team]
    return shares


def _starts(span: Span, window_s: float) -> list[float]:
    count = int((span[1] - span[0]) // window_s) + 1
    return [span[0] + index * window_s for index in range(count) if span[0] + index * window_s < span[1]]


def _by_window(parts: Sequence[tuple[str, int, float, float]], windows: Sequence[Span], window_s: float, span: Span) -> Windows:
    """Divide (team, devices, start, end) over the windows."""
    sums: Windows = [defaultdict(float) for _ in windows]
    for team, devices, start, end in parts:
        first = max(0, int((start - span[0]) // window_s))
        last = min(len(windows) - 1, int((end - span[0]) // window_s))
        for index in range(first, last + 1):
            sums[index][team] += devices * overlap((start, end), windows[index])
    return sums
