"""A run as an engine would tell it: a small simulation of chunks, scorers, deferral and updates that yields contract events.

Same seed, same story. Two devices: cpu:0 decodes and updates the actor, cpu:1 scores and updates the critic.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from oppo_contract.events import EVENT_ADAPTER, Event

DEVICES = ["cpu:0", "cpu:1"]
LANES = [("cpu:0", "actor"), ("cpu:1", "reward"), ("cpu:1", "reference"), ("cpu:1", "critic")]
SCORERS = (("reward", "reward-prefill", 0.008), ("reference", "reference-prefill", 0.010), ("critic", "critic-prefill", 0.009))
UPDATE_S = {"actor": 0.22, "critic": 0.15}
MADE_OF = {
    "engine": {"commit": "0f9d8c7b6a" * 4, "dirty": True},
    "versions": {"python": "3.11.7", "oppo": "0.1.0", "torch": "2.8.0", "transformers": "4.57.1"},
    "models": {"models.actor": "a1b2c3d4" * 8, "models.reward.model": "e5f60718" * 8},
    "prompts": "9a8b7c6d" * 8,
    "command": "oppo train SPEC.yaml --out OUT --root /srv/models",
}
SCRIPT = "<script>window.pwned = 1</script><img src=x onerror=window.pwned=1>"


@dataclass
class Pending:
    """A sequence that is being written."""

    id: int
    length: int
    done: int = 0
    age: int = 0
    start_s: float = 0.0
    end_s: float = 0.0


@dataclass
class Clock:
    """Work and idle time of one step, by device."""

    spans: list[tuple[str, str, str, float, float, int, int]] = field(default_factory=list)

    def work(self, device: str, role: str, phase: str, start: float, seconds: float, chunk: int = 0, rows: int = 0) -> float:
        self.spans.append((device, role, phase, start, start + seconds, chunk, rows))
        return start + seconds


class Story:
    """Tells one run, step by step. `overlap`: scorers stream and the longest answers are deferred."""

    def __init__(self, steps: int, *, overlap: bool, seed: int = 1, batch: int = 16, chunk: int = 32, start: float = 0.0) -> None:
        self.steps, self.overlap, self.batch, self.chunk, self.start = steps, overlap, batch, chunk, start
        self.rng = random.Random(seed)
        self.seq = self.step = self.next_id = self.tokens = 0
        self.at = 0.4
        self.delta = 4 if overlap else 0
        self.pool: list[Pending] = []

    def begin(self) -> list[Event]:
        """The `started` event and a line of log."""
        log = {"stream": "stderr", "lines": ["loading the actor", "warning: no GPU, training on 2 cores"]}
        return [
            self._event("started", devices=DEVICES, lanes=LANES, start_step=0, total_steps=self.steps, provenance=MADE_OF),
            self._event("log", **log),
        ]

    def tell(self, count: int) -> Iterator[Event]:
        """The events of the next `count` steps."""
        for _ in range(min(count, self.steps - self.step)):
            yield from self._one_step()

    def end(self) -> list[Event]:
        """The last event of a run that reached its end."""
        return [self._event("finished", outcome="succeeded", step=self.step, reason="All steps are done.")]

    def _event(self, kind: str, **payload: Any) -> Event:
        self.seq += 1
        return EVENT_ADAPTER.validate_python(
            {"kind": kind, "producer": "engine", "seq": self.seq, "time": self.start + self.at, **payload}, strict=False
        )

    def _one_step(self) -> Iterator[Event]:
        self.step += 1
        begin = self.at
        while len(self.pool) < self.batch + self.delta:
            length = min(512, max(8, round(38 * math.exp(0.85 * self.rng.gauss(0, 1) + 0.2 * self._progress()))))
            self.pool.append(Pending(self.next_id, length))
            self.next_id += 1
        clock, decoded = Clock(), self._decode(begin)
        trained, carried = decoded
        free = self._spans(clock, begin)
        self.at = free
        idle = idle_times(clock.spans, begin, free, self.full)
        yield self._event(
            "spans",
            step=self.step,
            window_s=(begin, free),
            idle=idle,
            deferred=crossing(trained, carried),
            **columns(clock.spans),
        )
        yield self._event("step", **self._figures(trained, begin, free, idle))
        yield from self._asides(trained)
        for sequence in carried:
            sequence.age += 1
        self.pool = carried

    def _progress(self) -> float:
        return 1 - math.exp(-self.step / (0.35 * self.steps))

    def _decode(self, begin: float) -> tuple[list[Pending], list[Pending]]:
        """Rounds of one chunk until the batch is full; remembers (rows, seconds) of each round for the spans."""
        self.rounds: list[tuple[int, float]] = []
        at = begin + 0.01
        for sequence in self.pool:
            sequence.start_s = at
        finished = [s for s in self.pool if s.done == s.length]  # surplus of the step before
        while len(finished) < self.batch:
            live = [s for s in self.pool if s.done < s.length]
            seconds = self.chunk * (0.0011 + 0.00003 * len(live)) * self.rng.uniform(0.95, 1.05)
            self.rounds.append((len(live), seconds))
            at += seconds
            for sequence in live:
                sequence.done, sequence.end_s = min(sequence.length, sequence.done + self.chunk), at
                if sequence.done == sequence.length:
                    finished.append(sequence)
        trained = finished[: self.batch]
        return trained, [s for s in self.pool if s not in trained]

    def _spans(self, clock: Clock, begin: float) -> float:
        at, scorer = begin + 0.01, begin + 0.01
        for number, (rows, seconds) in enumerate(self.rounds, start=1):
            at = clock.work("cpu:0", "actor", "decode", at, seconds, number, rows)
            if self.overlap:
                scorer = self._score(clock, max(scorer, at + 0.002), number, rows)
        self.full = at
        if not self.overlap:
            for number, (rows, _) in enumerate(self.rounds, start=1):
                at = scorer = self._score(clock, max(at, scorer), number, rows)
        ready = max(at, scorer) + 0.012
        update = {
            role: clock.work(f"cpu:{k}", role, f"update-{role}", ready, UPDATE_S[role] * self.rng.uniform(0.95, 1.05))
            for k, role in enumerate(UPDATE_S)
        }
        end = max(update.values())
        return clock.work("cpu:0", "actor", "checkpoint", end, 0.12) if self.step % 50 == 0 else end

    def _score(self, clock: Clock, at: float, chunk: int, rows: int) -> float:
        for role, phase, seconds in SCORERS:
            at = clock.work("cpu:1", role, phase, at, seconds * (0.4 + 0.6 * rows / (self.batch + 4)), chunk, rows)
        return at

    def _figures(self, trained: list[Pending], begin: float, end: float, idle: list[Any]) -> dict[str, Any]:
        lengths = sorted(s.length for s in trained)
        tokens, length_s = sum(lengths), end - begin
        self.tokens += tokens
        metrics = {
            **self._learning(lengths),
            **self._overlapping(trained, tokens, length_s),
            **use_of_devices(idle, length_s),
            "perf/throughput": tokens / length_s,
        }
        told = {"elapsed_s": end, "generated_tokens": self.tokens, "device_seconds": 2 * end}
        return {"step": self.step, **told, "metrics": metrics}

    def _learning(self, lengths: list[int]) -> dict[str, float]:
        """What PPO says of a step, by metric."""
        progress, noise = self._progress(), self.rng.gauss
        return {
            "critic/score/mean": 0.2 + 1.4 * progress + noise(0, 0.05),
            "objective/kl": 6.5 * progress + abs(noise(0, 0.15)),
            "response_length/mean": sum(lengths) / len(lengths),
            **{
                f"response_length/p{q}": float(lengths[min(len(lengths) - 1, q * len(lengths) // 100)])
                for q in (10, 25, 50, 75, 90)
            },
            "actor/entropy": 1.9 - 0.8 * progress + noise(0, 0.03),
            "actor/pg_clipfrac": 0.06 + 0.1 * math.exp(-self.step / 20) + abs(noise(0, 0.01)),
            "critic/vf_loss": 0.06 + 0.6 * math.exp(-self.step / 15) + abs(noise(0, 0.01)),
            "critic/vf_explained_var": 0.8 * progress + noise(0, 0.03),
        }

    def _overlapping(self, trained: list[Pending], tokens: int, length_s: float) -> dict[str, float]:
        """What overlap does in a step of `tokens` trained tokens, by metric."""
        return {
            "oppo/overcommit": float(self.delta),
            "oppo/chunk_size": float(self.chunk),
            "oppo/deferred": float(len(self.pool) - self.batch),
            "oppo/deferred_token_share": sum(s.done for s in trained if s.age) / tokens,
            "timing_s/step": length_s,
            "timing_s/gen": sum(seconds for _, seconds in self.rounds),
            "decode_occupancy": sum(rows for rows, _ in self.rounds) / len(self.rounds) / (self.batch + self.delta),
        }

    def _asides(self, trained: list[Pending]) -> Iterator[Event]:
        if self.overlap and self.step % 8 == 0:
            new = self.delta + self.rng.choice((-1, 0, 1)) if 2 < self.delta < 8 else 4
            reason = f"slope {self.rng.uniform(0, 3):.1f}e-3 > SE 1.2e-3: the reward rises"
            yield self._event("decision", step=self.step, controller="overcommit", old=self.delta, new=new, reason=reason)
            self.delta = new
        oldest = max(trained, key=lambda s: s.age)
        stale = "My dear friend, the sea is grey today " if oldest.age else ""
        sample = {
            "sequence_id": oldest.id,
            "prompt": f"write a letter about the {'sea' if self.step % 2 else 'harbour'} {SCRIPT}",
            "response": f"{stale}and I think of you on day {self.step}. {SCRIPT}",
            "stale_response": stale,
            "score": 0.4 + self._progress(),
            "kl": 0.8,
            "length": oldest.length,
            "age": oldest.age,
            "versions": (max(0, self.step - 1 - oldest.age), self.step - 1),
            "ending": "length" if oldest.length == 512 else "eos",
        }
        yield self._event("samples", step=self.step, samples=[sample])
        yield self._event("log", stream="stderr", lines=[f"step {self.step} of {self.steps}, {len(trained)} answers"])


def use_of_devices(idle: list[Any], length_s: float) -> dict[str, float]:
    """How busy each device is in a step of `length_s` seconds and why it is not, by metric."""
    idle_s = {
        d: {c: sum(b - a for dev, cause, a, b in idle if dev == d and cause == c) for c in {c for _, c, _, _ in idle}}
        for d in DEVICES
    }
    bubble = {d: sum(idle_s[d].values()) / length_s for d in DEVICES}
    return {
        "overlap_factor": sum(1 - share for share in bubble.values()),
        **{f"bubble/{d}": share for d, share in bubble.items()},
        **{f"busy/{d}": 1 - share for d, share in bubble.items()},
        **{f"idle_s/{d}/{cause}": seconds for d, causes in idle_s.items() for cause, seconds in causes.items()},
    }


def columns(spans: list[tuple[str, str, str, float, float, int, int]]) -> dict[str, Any]:
    """Spans as the event's columns."""
    names = ("device", "role", "phase", "start_s", "end_s", "chunk", "rows")
    return {name: [span[i] for span in spans] for i, name in enumerate(names)}


def idle_times(spans: list[Any], begin: float, end: float, full: float) -> list[tuple[str, str, float, float]]:
    """What the spans leave free on each device; until the batch is full the scorer waits for the actor, later for the update."""
    found = []
    for device in DEVICES:
        at = begin
        for start, stop in [*sorted((s[3], s[4]) for s in spans if s[0] == device), (end, end)]:
            edges = [at, *(t for t in (full, full + 0.05) if at < t < start), start]
            found += [(device, _cause(device, a, full), a, b) for a, b in itertools.pairwise(edges) if b - a > 1e-4]
            at = max(at, stop)
    return found


def _cause(device: str, at: float, full: float) -> str:
    if at >= full + 0.05:
        return "update"
    if at >= full:
        return "score"
    return "decode" if device == "cpu:1" else "data"


def crossing(trained: list[Pending], carried: list[Pending]) -> list[dict[str, Any]]:
    """The sequences that came from an earlier step or go on into the next, which makes them one step older."""
    both = [(s, True) for s in trained if s.age] + [(s, False) for s in carried]
    return [
        {
            "sequence_id": s.id,
            "age": s.age if done else s.age + 1,
            "tokens": s.done,
            "start_s": s.start_s,
            "end_s": max(s.start_s, s.end_s),
            "trained": done,
        }
        for s, done in both
    ]
