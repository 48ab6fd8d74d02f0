"""Busy time, bubbles and causes, a pure function of spans (docs/metrics.md, "Time and devices").

For a device and a window: busy = length of the union of its work spans; every other second is idle and has a cause. Costs n·log n
in the number of spans, once for all devices with the same spans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from oppo_contract.events import IdleCause, Phase
from oppo_core.trace.recorder import Span, Wait

# Cause of another device's idle time while the actor's process is in that phase.
CAUSE_OF: dict[Phase, IdleCause] = {
    "decode": "decode", "actor-prefill": "weights", "weights": "weights", "data": "data", "advantages": "score",
    "actor-forward": "score", "score": "score", "reward-prefill": "score", "reference-prefill": "score",
    "critic-prefill": "score", "update-actor": "update", "update-critic": "update", "checkpoint": "checkpoint", "eval": "eval",
}  # fmt: skip

Interval = tuple[float, float]
Reason = tuple[float, float, IdleCause]


class Idle(NamedTuple):
    """A bubble: `device` was idle from `start` to `end`, because of `cause`."""

    device: str
    cause: IdleCause
    start: float
    end: float


def union(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The intervals within `window`, merged and in order."""
    merged: list[Interval] = []
    for start, end in sorted((max(a, window[0]), min(b, window[1])) for a, b in intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def gaps(busy: list[Interval], window: Interval) -> list[Interval]:
    """The rest of `window` outside `union`."""
    edges = [window[0], *(edge for interval in busy for edge in interval), window[1]]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def idle_times(devices: list[str], spans: list[Span], waits: list[Wait], window: Interval, tail_rows: int) -> list[Idle]:
    """Every idle interval of every device within `window`, with its cause.

    A device's own `Wait` decides; otherwise the other devices' work at that moment; otherwise their waits (a message in flight).
    Decoding with at most `tail_rows` rows is `tail`. Adjacent pieces of the same cause are merged.
    """
    work = flattened((s.start, s.end, _cause(s, tail_rows)) for s in spans)
    waited = flattened((w.start, w.end, w.cause) for w in waits)
    result: list[Idle] = []
    for alike in _group_devices(devices, spans, waits):
        own = flattened((w.start, w.end, w.cause) for w in waits if alike[0] in w.devices)
        free = gaps(union([(s.start, s.end) for s in spans if alike[0] in s.devices], window), window)
        pieces = _assign_causes(free, [own, work, waited])
        result += [Idle(device, cause, start, end) for device in alike for start, end, cause in pieces]
    return result


def busy_shares(idle: list[Idle], devices: list[str], window: Interval) -> dict[str, float]:
    """busy/{device}: busy share of `window`, 0 to 1; `idle`: the result of `idle_times`."""
    length = window[1] - window[0]
    free = dict.fromkeys(devices, 0.0)
    for piece in idle:
        free[piece.device] += piece.end - piece.start
    return {device: max(0.0, 1 - seconds / length) if length > 0 else 0.0 for device, seconds in free.items()}


def idle_by_cause(idle: list[Idle]) -> dict[tuple[str, IdleCause], float]:
    """Idle seconds by (device, cause)."""
    sums: dict[tuple[str, IdleCause], float] = defaultdict(float)
    for piece in idle:
        sums[piece.device, piece.cause] += piece.end - piece.start
    return dict(sums)


def flattened(reasons: Iterable[Reason]) -> list[Reason]:
    """The same causes without overlaps, in order; of several at one moment the first in the input counts."""
    given = [reason for reason in reasons if reason[1] > reason[0]]
    order = sorted(range(len(given)), key=lambda i: given[i][0])
    edges = sorted({edge for reason in given for edge in reason[:2]})
    flat: list[Reason] = []
    covering: list[int] = []  # a heap of places in `given`
    following = 0
    for start, end in pairwise(edges):
        while following < len(order) and given[order[following]][0] == start:
            heappush(covering, order[following])
            following += 1
        while covering and given[covering[0]][1] <= start:
            heappop(covering)
        if covering:
            flat.append((start, end, given[covering[0]][2]))
    return flat


def _cause(span: Span, tail_rows: int) -> IdleCause:
    return "tail" if span.phase == "decode" and span.rows <= tail_rows else CAUSE_OF[span.phase]


def _group_devices(devices: list[str], spans: list[Span], waits: list[Wait]) -> list[list[str]]:
    """Groups of devices with the same work and waits."""
    groups: dict[tuple[int, ...], list[str]] = {}
    teams = list({span.devices for span in spans} | {wait.devices for wait in waits})
    for device in devices:
        groups.setdefault(tuple(number for number, team in enumerate(teams) if device in team), []).append(device)
    return list(groups.values())


def _assign_causes(free: list[Interval], causes: list[list[Reason]]) -> list[Reason]:
    """Split `free` where causes change; the first list of `causes` that covers a moment decides."""
    pieces: list[Reason] = []
    for reasons in causes:
        covered, free = _cover(free, reasons)
        pieces += covered
    pieces += [(start, end, "unknown") for start, end in free]
    joined: list[Reason] = []
    for piece in sorted(pieces):
        if joined and joined[-1][2] == piece[2] and joined[-1][1] == piece[0]:
            joined[-1] = (joined[-1][0], piece[1], piece[2])
        else:
            joined.append(piece)
    return joined


def _cover(free: list[Interval], reasons: list[Reason]) -> tuple[list[Reason], list[Interval]]:
    """The parts of `free` that `reasons` cover, and the rest; both in order and without overlaps."""
    covered: list[Reason] = []
    left: list[Interval] = []
    first = 0
    for start, end in free:
        while first < len(reasons) and reasons[first][1] <= start:
            first += 1
        place, at = first, start
        while place < len(reasons) and reasons[place][0] < end:
            begin, finish = max(at, reasons[place][0]), min(end, reasons[place][1])
            if at < begin:
                left.append((at, begin))
            covered.append((begin, finish, reasons[place][2]))
            at = finish
            place += 1
        if at < end:
            left.append((at, end))
    return covered, left
