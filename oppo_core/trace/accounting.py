"""Busy, bubble and cause, a pure function of spans (docs/metrics.md, "Time and devices").

For a device and a window: busy = length of the union of its work spans; every other second is idle and carries a cause.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from oppo_contract.events import IdleCause, Phase
from oppo_core.trace.recorder import Span, Wait

# What an idle device waits for while the actor's process is in that phase.
CAUSE_OF: dict[Phase, IdleCause] = {
    "decode": "decode", "actor-prefill": "weights", "weights": "weights", "data": "data", "advantages": "score",
    "actor-forward": "score", "score": "score", "reward-prefill": "score", "reference-prefill": "score",
    "critic-prefill": "score", "update-actor": "update", "update-critic": "update", "checkpoint": "checkpoint", "eval": "eval",
}  # fmt: skip

Interval = tuple[float, float]
Reason = tuple[float, float, IdleCause]


@dataclass(frozen=True, slots=True)
class Idle:
    """A bubble: `device` did nothing from `start` to `end`, because of `cause`."""

    device: str
    cause: IdleCause
    start: float
    end: float


def union(intervals: list[Interval], window: Interval) -> list[Interval]:
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
    """What `union` leaves free of `window`."""
    edges = [window[0], *(edge for interval in busy for edge in interval), window[1]]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def idle_times(devices: list[str], spans: list[Span], waits: list[Wait], window: Interval, tail_rows: int) -> list[Idle]:
    """Every idle interval of every device within `window`, with its cause.

    A device's own `Wait` decides; else what the other devices' processes did at that moment; else what those waited for
    (an answer on its way). Decoding with at most `tail_rows` rows is `tail`. Adjacent pieces of the same cause are one.
    """
    work: list[Reason] = [(s.start, s.end, _cause(s, tail_rows)) for s in spans]
    waited: list[Reason] = [(w.start, w.end, w.cause) for w in waits]
    found = []
    for device in devices:
        own: list[Reason] = [(w.start, w.end, w.cause) for w in waits if device in w.devices]
        busy = union([(s.start, s.end) for s in spans if device in s.devices], window)
        for gap in gaps(busy, window):
            found += _explain(device, gap, [own, work, waited])
    return found


def busy_share(devices: list[str], spans: list[Span], window: Interval) -> dict[str, float]:
    """busy/{device}: share of `window` in which the device worked, 0 to 1."""
    length = window[1] - window[0]
    shares = {}
    for device in devices:
        busy = union([(s.start, s.end) for s in spans if device in s.devices], window)
        shares[device] = sum(end - start for start, end in busy) / length if length > 0 else 0.0
    return shares


def idle_by_cause(idle: list[Idle]) -> dict[tuple[str, IdleCause], float]:
    """Idle seconds a (device, cause)."""
    sums: dict[tuple[str, IdleCause], float] = defaultdict(float)
    for piece in idle:
        sums[piece.device, piece.cause] += piece.end - piece.start
    return dict(sums)


def _cause(span: Span, tail_rows: int) -> IdleCause:
    return "tail" if span.phase == "decode" and span.rows <= tail_rows else CAUSE_OF[span.phase]


def _explain(device: str, gap: Interval, reasons: list[list[Reason]]) -> list[Idle]:
    """Cut `gap` where causes change; of several lists of reasons the first one that covers a moment decides."""
    near = [[r for r in several if r[0] < gap[1] and r[1] > gap[0]] for several in reasons]
    edges = sorted({gap[0], gap[1], *(t for several in near for r in several for t in r[:2] if gap[0] < t < gap[1])})
    pieces: list[Idle] = []
    for start, end in pairwise(edges):
        middle = (start + end) / 2
        cause: IdleCause = next((c for several in near for a, b, c in several if a <= middle < b), "unknown")
        if pieces and pieces[-1].cause == cause and pieces[-1].end == start:
            pieces[-1] = Idle(device, cause, pieces[-1].start, end)
        else:
            pieces.append(Idle(device, cause, start, end))
    return pieces
