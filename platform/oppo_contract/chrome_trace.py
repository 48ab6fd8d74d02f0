"""A run's timeline as Chrome Trace Event JSON, for ui.perfetto.dev and chrome://tracing. A pure function of its events.

Processes are drawn as processes, a device's lanes (one a role) as their threads. Beside them stand the run itself (steps,
counters, decisions, checkpoints), every bubble with its cause, and the answers that were deferred. Times in microseconds
since the first `started` event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from oppo_contract.events import CheckpointEvent, DecisionEvent, Event, IdleCause, SpansEvent, StartedEvent

RUN, ACTOR, SCORERS, BUBBLES, DEFERRED = PROCESSES = ("run", "actor", "scorers", "bubbles", "deferred answers")
# Names from the viewer's reserved palette; Perfetto chooses colours of its own.
IDLE_COLOURS: dict[IdleCause, str] = {
    "decode": "thread_state_runnable", "tail": "bad", "score": "thread_state_iowait", "update": "rail_response",
    "weights": "rail_load", "data": "rail_animation", "checkpoint": "startup", "eval": "good", "unknown": "terrible",
}  # fmt: skip
# At one moment: slices first, the longest of them outermost, then what is bound to them.
RANK = {"M": 0, "X": 1, "C": 2, "i": 3, "s": 4, "f": 5}

Track = tuple[str, str]  # process, thread
Json = dict[str, Any]


@dataclass(eq=False, slots=True)
class Slice:
    """Something that took from `start` to `end`, µs. `lane` counts the threads that a track needs beside each other."""

    track: Track
    start: int
    end: int
    name: str
    arguments: Json
    colour: str | None = None
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Flow:
    """An arrow between two slices."""

    name: str
    source: Slice
    target: Slice


@dataclass(slots=True)
class Drawing:
    """Everything that is to be drawn, before it has found its place."""

    slices: list[Slice] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    counters: list[tuple[int, str, float]] = field(default_factory=list)
    marks: list[tuple[int, str, Json]] = field(default_factory=list)
    last_segment: dict[int, Slice] = field(default_factory=dict)  # of every deferred answer

    @property
    def end(self) -> int:
        """The last moment drawn, µs."""
        return max((piece.end for piece in self.slices), default=0)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the engine: its place on the common axis, and which process each device belongs to."""

    number: int
    zero_us: int
    wall: float
    owner: dict[str, str]

    def at(self, seconds: float) -> int:
        """µs on the common axis of a time since this attempt's `started` event."""
        return self.zero_us + round(seconds * 1e6)


def chrome_trace(events: Iterable[Event]) -> Json:
    """The trace file's content.

    Args:
        events: as an outbox file holds them; attempts that were appended to it after a resume follow each other.

    Raises:
        ValueError: there is no `started` event: the run never started to train.
    """
    drawing = Drawing()
    attempt: Attempt | None = None
    first_wall = 0.0
    for event in events:
        if isinstance(event, StartedEvent):
            first_wall = event.time if attempt is None else first_wall
            # Never before the end of the last attempt, whatever the machine's clock was set to meanwhile.
            zero = max(round((event.time - first_wall) * 1e6), drawing.end)
            attempt = Attempt(attempt.number + 1 if attempt else 1, zero, event.time, _owners(event))
            drawing.last_segment.clear()
            drawing.marks.append((zero, f"attempt {attempt.number}", {"start_step": event.start_step}))
        elif attempt is not None:
            _draw(drawing, attempt, event)
    if attempt is None:
        raise ValueError("there is no `started` event: the run never started to train")
    return {"traceEvents": _placed(drawing), "displayTimeUnit": "ms"}


def _owners(started: StartedEvent) -> dict[str, str]:
    """A device belongs to the process whose lane is drawn first on it: sequential PPO has one process for all."""
    owners: dict[str, str] = {}
    for device, role in started.lanes:
        owners.setdefault(device, ACTOR if role == "actor" else SCORERS)
    return owners


def _draw(drawing: Drawing, attempt: Attempt, event: Event) -> None:
    if isinstance(event, SpansEvent):
        _draw_step(drawing, attempt, event)
        _draw_deferred(drawing, attempt, event)
    elif isinstance(event, DecisionEvent):
        arguments = {"old": event.old, "new": event.new, "reason": event.reason}
        drawing.marks.append(
            (max(attempt.at(event.time - attempt.wall), attempt.zero_us), f"{event.controller} decision", arguments)
        )
    elif isinstance(event, CheckpointEvent):
        at = max(attempt.at(event.time - attempt.wall), attempt.zero_us)
        drawing.marks.append((at, "checkpoint", {"step": event.step, "folder": event.folder}))


def _draw_step(drawing: Drawing, attempt: Attempt, event: SpansEvent) -> None:
    start, end = (attempt.at(t) for t in event.window_s)
    about = {"step": event.step, "attempt": attempt.number}
    drawing.slices.append(Slice((RUN, "steps"), start, end, f"step {event.step}", about))
    columns = zip(event.device, event.role, event.phase, event.start_s, event.end_s, event.chunk, event.rows, strict=True)
    spans = []
    for device, role, phase, begun, done, chunk, rows in columns:
        track = (attempt.owner.get(device, ACTOR if role == "actor" else SCORERS), f"{device} {role}")
        arguments = about | {"chunk": chunk, "rows": rows}
        spans.append(Slice(track, attempt.at(begun), attempt.at(done), phase, arguments))
    drawing.slices += spans
    drawing.flows += [Flow(f"chunk {event.chunk[writer]}", spans[writer], spans[reader]) for writer, reader in event.flows]
    for device, cause, begun, done in event.idle:
        piece = Slice((BUBBLES, device), attempt.at(begun), attempt.at(done), cause, about | {"cause": cause}, IDLE_COLOURS[cause])
        drawing.slices.append(piece)
    for name, samples in event.counters.items():
        drawing.counters += [(attempt.at(t), name, value) for t, value in samples]


def _draw_deferred(drawing: Drawing, attempt: Attempt, event: SpansEvent) -> None:
    """A row for every answer that crosses a step's end, its pieces joined by arrows."""
    for answer in event.deferred:
        arguments = {"step": event.step, "age": answer.age, "tokens": answer.tokens, "trained": answer.trained}
        start, end = attempt.at(answer.start_s), attempt.at(answer.end_s)
        piece = Slice((DEFERRED, "answers"), start, end, f"answer {answer.sequence_id}", arguments)
        before = drawing.last_segment.pop(answer.sequence_id, None)
        if before is not None:
            drawing.flows.append(Flow("deferred", before, piece))
        if not answer.trained:
            drawing.last_segment[answer.sequence_id] = piece
        drawing.slices.append(piece)


def _placed(drawing: Drawing) -> list[Json]:
    """The events of the file: names first, then by time."""
    _choose_lanes(drawing.slices)
    tracks = sorted({(piece.track, piece.lane) for piece in drawing.slices}, key=lambda t: (PROCESSES.index(t[0][0]), *t))
    threads = {key: number for number, key in enumerate(tracks, start=1)}
    placed = [_slice(piece, threads) for piece in drawing.slices]
    run = PROCESSES.index(RUN) + 1
    placed += [{"ph": "C", "pid": run, "ts": ts, "name": name, "args": {"value": v}} for ts, name, v in drawing.counters]
    placed += [
        {"ph": "i", "s": "p", "pid": run, "tid": 0, "ts": ts, "name": name, "args": arguments}
        for ts, name, arguments in drawing.marks
    ]
    for number, flow in enumerate(drawing.flows, start=1):
        placed += _arrow(number, flow, threads)
    placed.sort(key=lambda event: (event["ts"], RANK[event["ph"]], -event.get("dur", 0)))
    return _names(threads) + placed


def _choose_lanes(slices: list[Slice]) -> None:
    """Slices of one thread may enclose each other and must not overlap otherwise; deferred answers stand side by side."""
    open_ends: dict[tuple[Track, int], list[int]] = {}
    for piece in sorted(slices, key=lambda s: (s.start, -s.end)):
        while True:
            ends = open_ends.setdefault((piece.track, piece.lane), [])
            while ends and ends[-1] <= piece.start:
                ends.pop()
            if not ends or (piece.end <= ends[-1] and piece.track[0] != DEFERRED):
                ends.append(piece.end)
                break
            piece.lane += 1


def _slice(piece: Slice, threads: dict[tuple[Track, int], int]) -> Json:
    placed = {
        "ph": "X", "cat": piece.track[0], "name": piece.name, **_address(piece, threads), "ts": piece.start,
        "dur": piece.end - piece.start, "args": piece.arguments,
    }  # fmt: skip
    return placed | {"cname": piece.colour} if piece.colour else placed


def _address(piece: Slice, threads: dict[tuple[Track, int], int]) -> Json:
    return {"pid": PROCESSES.index(piece.track[0]) + 1, "tid": threads[piece.track, piece.lane]}


def _arrow(number: int, flow: Flow, threads: dict[tuple[Track, int], int]) -> list[Json]:
    """From inside the source to the beginning of the target; none where a slice without length has no inside."""
    source, target = flow.source, flow.target
    start = min(source.end - 1, target.start)
    if start < source.start or target.end == target.start:
        return []
    common = {"cat": "flow", "name": flow.name, "id": number}
    return [
        {"ph": "s", **common, **_address(source, threads), "ts": start},
        {"ph": "f", "bp": "e", **common, **_address(target, threads), "ts": target.start},
    ]


def _names(threads: dict[tuple[Track, int], int]) -> list[Json]:
    """Names and order of processes and threads."""
    named: list[Json] = []
    for number, process in enumerate(PROCESSES, start=1):
        if any(track[0] == process for track, _ in threads):
            named += _name("process", process, number, 0, number)
    for (track, lane), tid in threads.items():
        title = track[1] if lane == 0 else f"{track[1]} ({lane + 1})"
        named += _name("thread", title, PROCESSES.index(track[0]) + 1, tid, tid)
    return named


def _name(kind: str, name: str, pid: int, tid: int, order: int) -> list[Json]:
    about = {"ph": "M", "pid": pid, "tid": tid, "ts": 0}
    return [
        about | {"name": f"{kind}_name", "args": {"name": name}},
        about | {"name": f"{kind}_sort_index", "args": {"sort_index": order}},
    ]
