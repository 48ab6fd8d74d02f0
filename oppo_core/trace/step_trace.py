"""Metrics of a step and the `spans` event, from its spans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, get_args

from oppo_contract.events import Counter, IdleCause
from oppo_core.rollout.sequence import Sequence
from oppo_core.trace.accounting import Idle, Interval, busy_shares, idle_by_cause, idle_times
from oppo_core.trace.recorder import Span, Wait

TIMING_OF = {
    "decode": "gen", "actor-prefill": "gen", "score": "score", "reward-prefill": "score", "reference-prefill": "score",
    "critic-prefill": "score", "actor-forward": "adv", "advantages": "adv", "update-actor": "update_actor",
    "update-critic": "update_critic", "checkpoint": "save_checkpoint",
}  # fmt: skip

IDLE_CAUSES: tuple[IdleCause, ...] = get_args(IdleCause)
READS = {"reward-prefill", "reference-prefill", "critic-prefill"}
Samples = list[tuple[float, float]]  # (time, value)


class StepTrace:
    """The spans of one step's window, with causes of idle time."""

    def __init__(self, devices: list[str], spans: list[Span], waits: list[Wait], window: Interval, tail_rows: int) -> None:
        self.devices = devices
        self.spans = sorted(spans, key=lambda span: span.start)
        self.window = window
        self.idle: list[Idle] = idle_times(devices, self.spans, waits, window, tail_rows)

    def metrics(self, tokens: int) -> dict[str, float]:
        """busy, bubble and idle seconds per device, `timing_s/*`, throughput and overlap factor.

        `overlap_factor` = work of all processes ÷ window: 1 if nothing runs concurrently and nothing is idle.
        """
        length = self.window[1] - self.window[0]
        metrics: dict[str, float] = {}
        for device, share in busy_shares(self.idle, self.devices, self.window).items():
            metrics |= {f"busy/{device}": share, f"bubble/{device}": 1 - share}
        idle = idle_by_cause(self.idle)
        for device in self.devices:  # zeros too, or the newest value of a cause would be an older step's
            metrics |= {f"idle_s/{device}/{cause}": idle.get((device, cause), 0.0) for cause in IDLE_CAUSES}
        timing: dict[str, float] = defaultdict(float)
        work = 0.0
        for span in self.spans:
            work += span.end - span.start
            if span.phase in TIMING_OF:
                timing[TIMING_OF[span.phase]] += span.end - span.start
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
        return metrics | {
            "timing_s/step": length,
            "perf/time_per_step": length,
            "perf/throughput": tokens / length,
            "perf/total_num_tokens": float(tokens),
            "overlap_factor": work / length,
        }

    def event(
        self, step: int, origin: float, deferred: list[dict[str, Any]], counters: dict[Counter, Samples] | None = None
    ) -> dict[str, Any]:
        """Payload of a `SpansEvent`, times relative to `origin`; `counters`: in addition to those of the spans."""
        spans, pairs = self.spans, handovers(self.spans)
        counted = {"live_rows": live_rows(spans), "waiting_handovers": waiting_handovers(spans, pairs)} | (counters or {})
        places = [0, *accumulate(len(span.devices) for span in spans)]
        rows = [(device, span) for span in spans for device in span.devices]
        return {
            "step": step,
            "window_s": (self.window[0] - origin, self.window[1] - origin),
            "device": [device for device, _ in rows],
            "role": [span.role for _, span in rows],
            "phase": [span.phase for _, span in rows],
            "start_s": [round(span.start - origin, 6) for _, span in rows],
            "end_s": [round(span.end - origin, 6) for _, span in rows],
            "chunk": [span.chunk for _, span in rows],
            "rows": [span.rows for _, span in rows],
            "idle": [(i.device, i.cause, round(i.start - origin, 6), round(i.end - origin, 6)) for i in self.idle],
            "deferred": deferred,
            "flows": [(places[writer], places[reader]) for writer, reader in pairs],
            "counters": {name: [(round(t - origin, 6), value) for t, value in samples] for name, samples in counted.items()},
        }


def handovers(spans: list[Span]) -> list[tuple[int, int]]:
    """(writer, reader) indices in `spans`: the span that decoded a chunk, and each scorer's span that read it."""
    decoded: dict[int, list[int]] = defaultdict(list)
    for place, span in enumerate(spans):
        if span.phase == "decode" and span.chunk:
            decoded[span.chunk].append(place)
    pairs = []
    for place, span in enumerate(spans):
        if span.phase in READS and span.chunk:
            # A step that decodes twice restarts its chunk numbers: the latest writer before the reader counts.
            writers = [writer for writer in decoded[span.chunk] if spans[writer].start <= span.start]
            pairs += [(max(writers, key=lambda writer: spans[writer].start), place)] if writers else []
    return pairs


def live_rows(spans: list[Span]) -> Samples:
    """Rows being decoded, at the beginning of every chunk, and 0 after the last."""
    decoding = [span for span in spans if span.phase == "decode"]
    return [(span.start, float(span.rows)) for span in decoding] + [(span.end, 0.0) for span in decoding[-1:]]


def waiting_handovers(spans: list[Span], pairs: list[tuple[int, int]]) -> Samples:
    """Chunks handed over that no scorer has begun to read: the queue depth between the processes.

    `pairs` are the `handovers` of `spans`.
    """
    begun: dict[int, float] = {}
    for writer, reader in pairs:
        begun[writer] = min(spans[reader].start, begun.get(writer, float("inf")))
    # A scorer may begin before the actor's span, in which the chunk was sent, has ended.
    sent = [(min(spans[writer].end, start), 1.0) for writer, start in begun.items()]
    return running_total(sent + [(start, -1.0) for start in begun.values()])


def running_total(changes: Iterable[tuple[float, float]]) -> Samples:
    """(time, change) pairs in any order as (time, sum so far)."""
    ordered = sorted(changes, key=lambda change: (change[0], -change[1]))
    return list(zip((t for t, _ in ordered), accumulate(change for _, change in ordered), strict=True))


def deferred_rows(
    trained: list[Sequence], carried: list[Sequence], ends: dict[int, float], decode: Interval, origin: float
) -> list[dict[str, Any]]:
    """`DeferredSequence`s of a step: answers that came from an earlier step, and answers that go on into the next."""

    def row(sequence: Sequence, age: int, is_trained: bool) -> dict[str, Any]:
        end = ends.get(sequence.sequence_id, decode[0] if sequence.finished else decode[1])
        return {
            "sequence_id": sequence.sequence_id, "age": age, "tokens": sequence.length, "trained": is_trained,
            "start_s": round(decode[0] - origin, 6), "end_s": round(end - origin, 6),
        }  # fmt: skip

    return [row(s, s.age, True) for s in trained if s.age > 0] + [row(s, s.age, False) for s in carried]
