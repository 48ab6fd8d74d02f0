"""Converts a run's events to Chrome Trace Event JSON, for ui.perfetto.dev and chrome://tracing. A pure function.

Trace processes: the run (steps, counters, decisions, checkpoints), actor and scorers (one thread per device and role), bubbles
with their idle cause, and deferred responses. Times are microseconds since the first `started` event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from oppo_contract.events import CheckpointEvent, DecisionEvent, Event, IdleCause, SpansEvent, StartedEvent

RUN, ACTOR, SCORERS, BUBBLES, DEFERRED = PROCESSES = ("run", "actor", "scorers", "bubbles", "deferred responses")
# Reserved colour names of chrome://tracing; Perfetto ignores them.
IDLE_COLOURS: dict[IdleCause, str] = {
    "decode": "thread_state_runnable", "tail": "bad", "score": "thread_state_iowait", "update": "rail_response",
    "weights": "rail_load", "data": "rail_animation", "checkpoint": "startup", "eval": "good", "unknown": "terrible",
}  # fmt: skip
# Sort order at equal times: slices first, then the events that refer to them.
PHASE_ORDER = {"M": 0, "X": 1, "C": 2, "i": 3, "s": 4, "f": 5}

Track = tuple[str, str]  # process, thread
Json = dict[str, Any]


@dataclass(eq=False, slots=True)
class Slice:
    """An interval from `start` to `end`, µs. `lane` numbers the parallel threads of a track."""

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
class TraceData:
    """Slices, flows, counters and instants collected from the events, before threads are assigned."""

    slices: list[Slice] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    counters: list[tuple[int, str, float]] = field(default_factory=list)
    instants: list[tuple[int, str, Json]] = field(default_factory=list)
    last_segment: dict[int, Slice] = field(default_factory=dict)  # by sequence_id of an untrained response

    @property
    def end(self) -> int:
        """End of the last slice, µs."""
        return max((slice_.end for slice_ in self.slices), default=0)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the engine: its offset on the common time axis, and the trace process of each device."""

    number: int
    zero_us: int
    wall: float
    owner: dict[str, str]

    def at(self, seconds: float) -> int:
        """Seconds since this attempt's `started` event → µs on the common axis."""
        return self.zero_us + round(seconds * 1e6)


def chrome_trace(events: Iterable[Event]) -> Json:
    """The trace file's content.

    Args:
        events: in the order of the outbox file; a resumed attempt follows the one before.

    Raises:
        ValueError: there is no `started` event: the run never started to train.
    """
    data = TraceData()
    attempt: Attempt | None = None
    first_wall = 0.0
    for event in events:
        if isinstance(event, StartedEvent):
            first_wall = event.time if attempt is None else first_wall
            # Attempts never overlap, even if the machine's clock was set back.
            zero = max(round((event.time - first_wall) * 1e6), data.end)
            attempt = Attempt(attempt.number + 1 if attempt else 1, zero, event.time, _owners(event))
            data.last_segment.clear()
            data.instants.append((zero, f"attempt {attempt.number}", {"start_step": event.start_step}))
        elif attempt is not None:
            _add_event(data, attempt, event)
    if attempt is None:
        raise ValueError("there is no `started` event: the run never started to train")
    return {"traceEvents": _trace_events(data), "displayTimeUnit": "ms"}


def _owners(started: StartedEvent) -> dict[str, str]:
    """Device → trace process of its first lane; sequential PPO uses one process for all roles."""
    owners: dict[str, str] = {}
    for device, role in started.lanes:
        owners.setdefault(device, ACTOR if role == "actor" else SCORERS)
    return owners


def _add_event(data: TraceData, attempt: Attempt, event: Event) -> None:
    if isinstance(event, SpansEvent):
        _add_step(data, attempt, event)
        _add_deferred(data, attempt, event)
    elif isinstance(event, DecisionEvent | CheckpointEvent):
        at = max(attempt.at(event.time - attempt.wall), attempt.zero_us)
        if isinstance(event, DecisionEvent):
            arguments: Json = {"old": event.old, "new": event.new, "reason": event.reason}
            data.instants.append((at, f"{event.controller} decision", arguments))
        else:
            data.instants.append((at, "checkpoint", {"step": event.step, "folder": event.folder}))


def _add_step(data: TraceData, attempt: Attempt, event: SpansEvent) -> None:
    start, end = (attempt.at(t) for t in event.window_s)
    common = {"step": event.step, "attempt": attempt.number}
    data.slices.append(Slice((RUN, "steps"), start, end, f"step {event.step}", common))
    columns = zip(event.device, event.role, event.phase, event.start_s, event.end_s, event.chunk, event.rows, strict=True)
    spans = []
    for device, role, phase, began, done, chunk, rows in columns:
        track = (attempt.owner.get(device, ACTOR if role == "actor" else SCORERS), f"{device} {role}")
        arguments = common | {"chunk": chunk, "rows": rows}
        spans.append(Slice(track, attempt.at(began), attempt.at(done), phase, arguments))
    data.slices += spans
    data.flows += [Flow(f"chunk {event.chunk[writer]}", spans[writer], spans[reader]) for writer, reader in event.flows]
    for device, cause, began, done in event.idle:
        arguments = common | {"cause": cause}
        data.slices.append(Slice((BUBBLES, device), attempt.at(began), attempt.at(done), cause, arguments, IDLE_COLOURS[cause]))
    for name, samples in event.counters.items():
        data.counters += [(attempt.at(t), name, value) for t, value in samples]


def _add_deferred(data: TraceData, attempt: Attempt, event: SpansEvent) -> None:
    """One row per response that crosses a step boundary; flow arrows join its slices."""
    for response in event.deferred:
        arguments = {"step": event.step, "age": response.age, "tokens": response.tokens, "trained": response.trained}
        start, end = attempt.at(response.start_s), attempt.at(response.end_s)
        slice_ = Slice((DEFERRED, "responses"), start, end, f"response {response.sequence_id}", arguments)
        before = data.last_segment.pop(response.sequence_id, None)
        if before is not None:
            data.flows.append(Flow("deferred", before, slice_))
        if not response.trained:
            data.last_segment[response.sequence_id] = slice_
        data.slices.append(slice_)


def _trace_events(data: TraceData) -> list[Json]:
    """Metadata events, then all others by time."""
    _assign_lanes(data.slices)
    tracks = sorted({(slice_.track, slice_.lane) for slice_ in data.slices}, key=lambda t: (PROCESSES.index(t[0][0]), *t))
    threads = {key: number for number, key in enumerate(tracks, start=1)}
    events = [_slice_event(slice_, threads) for slice_ in data.slices]
    run = PROCESSES.index(RUN) + 1
    events += [{"ph": "C", "pid": run, "ts": ts, "name": name, "args": {"value": v}} for ts, name, v in data.counters]
    events += [
        {"ph": "i", "s": "p", "pid": run, "tid": 0, "ts": ts, "name": name, "args": arguments}
        for ts, name, arguments in data.instants
    ]
    for number, flow in enumerate(data.flows, start=1):
        events += _flow_events(number, flow, threads)
    events.sort(key=lambda event: (event["ts"], PHASE_ORDER[event["ph"]], -event.get("dur", 0)))
    return _metadata(threads) + events


def _assign_lanes(slices: list[Slice]) -> None:
    """Set `lane` so that slices of one thread nest or do not overlap; deferred responses never nest."""
    open_ends: dict[tuple[Track, int], list[int]] = {}
    for slice_ in sorted(slices, key=lambda s: (s.start, -s.end)):
        while True:
            ends = open_ends.setdefault((slice_.track, slice_.lane), [])
            while ends and ends[-1] <= slice_.start:
                ends.pop()
            if not ends or (slice_.end <= ends[-1] and slice_.track[0] != DEFERRED):
                ends.append(slice_.end)
                break
            slice_.lane += 1


def _slice_event(slice_: Slice, threads: dict[tuple[Track, int], int]) -> Json:
    event = {
        "ph": "X", "cat": slice_.track[0], "name": slice_.name, **_thread_ids(slice_, threads), "ts": slice_.start,
        "dur": slice_.end - slice_.start, "args": slice_.arguments,
    }  # fmt: skip
    return event | {"cname": slice_.colour} if slice_.colour else event


def _thread_ids(slice_: Slice, threads: dict[tuple[Track, int], int]) -> Json:
    return {"pid": PROCESSES.index(slice_.track[0]) + 1, "tid": threads[slice_.track, slice_.lane]}


def _flow_events(number: int, flow: Flow, threads: dict[tuple[Track, int], int]) -> list[Json]:
    """From inside the source to the start of the target; empty if one of them has zero length."""
    source, target = flow.source, flow.target
    start = min(source.end - 1, target.start)
    if start < source.start or target.end == target.start:
        return []
    common = {"cat": "flow", "name": flow.name, "id": number}
    return [
        {"ph": "s", **common, **_thread_ids(source, threads), "ts": start},
        {"ph": "f", "bp": "e", **common, **_thread_ids(target, threads), "ts": target.start},
    ]


def _metadata(threads: dict[tuple[Track, int], int]) -> list[Json]:
    """Names and sort order of processes and threads."""
    events: list[Json] = []
    for number, process in enumerate(PROCESSES, start=1):
        if any(track[0] == process for track, _ in threads):
            events += _name_events("process", process, number, 0, number)
    for (track, lane), tid in threads.items():
        title = track[1] if lane == 0 else f"{track[1]} ({lane + 1})"
        events += _name_events("thread", title, PROCESSES.index(track[0]) + 1, tid, tid)
    return events


def _name_events(kind: str, name: str, pid: int, tid: int, order: int) -> list[Json]:
    common = {"ph": "M", "pid": pid, "tid": tid, "ts": 0}
    return [
        common | {"name": f"{kind}_name", "args": {"name": name}},
        common | {"name": f"{kind}_sort_index", "args": {"sort_index": order}},
    ]
