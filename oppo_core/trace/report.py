"""From spans to what is shown: metrics of a step, and the `spans` event."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, get_args

from oppo_contract.events import IdleCause
from oppo_core.rollout.sequence import Sequence
from oppo_core.trace.accounting import Idle, Interval, busy_share, idle_by_cause, idle_times
from oppo_core.trace.recorder import Span, Wait

TIMING_OF = {
    "decode": "gen", "actor-prefill": "gen", "score": "score", "reward-prefill": "score", "reference-prefill": "score",
    "critic-prefill": "score", "actor-forward": "adv", "advantages": "adv", "update-actor": "update_actor",
    "update-critic": "update_critic", "checkpoint": "save_checkpoint",
}  # fmt: skip

IDLE_CAUSES: tuple[IdleCause, ...] = get_args(IdleCause)


class StepTrace:
    """The spans of one step window, explained."""

    def __init__(self, devices: list[str], spans: list[Span], waits: list[Wait], window: Interval, tail_rows: int) -> None:
        self.devices = devices
        self.spans = spans
        self.window = window
        self.idle: list[Idle] = idle_times(devices, spans, waits, window, tail_rows)

    def metrics(self, tokens: int) -> dict[str, float]:
        """busy, bubble and idle seconds a device, `timing_s/*`, throughput and overlap factor.

        `overlap_factor` = work of all processes ÷ window: 1 when nothing runs at the same time and nothing is idle.
        """
        length = self.window[1] - self.window[0]
        metrics: dict[str, float] = {}
        for device, share in busy_share(self.devices, self.spans, self.window).items():
            metrics |= {f"busy/{device}": share, f"bubble/{device}": 1 - share}
        idle = idle_by_cause(self.idle)
        for device in self.devices:  # zeros too: the newest value of a cause must not be an old step's
            metrics |= {f"idle_s/{device}/{cause}": idle.get((device, cause), 0.0) for cause in IDLE_CAUSES}
        timing: dict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.phase in TIMING_OF:
                timing[TIMING_OF[span.phase]] += span.end - span.start
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
        work = sum(span.end - span.start for span in self.spans)
        return metrics | {
            "timing_s/step": length,
            "perf/time_per_step": length,
            "perf/throughput": tokens / length,
            "perf/total_num_tokens": float(tokens),
            "overlap_factor": work / length,
        }

    def event(self, step: int, origin: float, deferred: list[dict[str, Any]]) -> dict[str, Any]:
        """Payload of a `SpansEvent`, times relative to `origin`."""
        rows = [(device, span) for span in sorted(self.spans, key=lambda s: s.start) for device in span.devices]
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
        }


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
