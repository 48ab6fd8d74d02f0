"""A recorded run, read from its events file: trained answers, Δ, C and spans of every step."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oppo_contract.events import Event, Phase, Role, SpansEvent, StartedEvent, StepEvent, parse_event
from oppo_contract.spec import RunSpec, load_stored_spec
from oppo_contract.spec_errors import SpecError

METRICS = OVERCOMMIT, CHUNK = ("oppo/overcommit", "oppo/chunk_size")
Key = tuple[int, Role, Phase, int, int]  # step, role, phase, chunk, count within these


class RecordingError(ValueError):
    """Events that cannot be replayed. The message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step. Times in seconds; `spans` by key, each once even if it occupied several devices."""

    window: tuple[float, float]
    overcommit: int
    chunk: int
    tokens: int
    spans: dict[Key, tuple[float, float]]
    unknown_s: float  # idle seconds of the actor's first device without a recorded cause

    @property
    def seconds(self) -> float:
        """Length of its window."""
        return self.window[1] - self.window[0]


@dataclass(slots=True)
class Recording:
    """A run from its first step. `lengths` and `prompts`: response and prompt tokens of every trained answer by its id."""

    spec: RunSpec
    started: StartedEvent
    decodes_on: int = 1  # devices that decode
    steps: list[RecordedStep] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Sum of the steps' windows."""
        return sum(step.seconds for step in self.steps)

    def devices_of(self, role: Role) -> list[str]:
        """Devices that a role used, in order."""
        return [device for device, lane in self.started.lanes if lane == role]


def read_recording(file: Path, spec: RunSpec | None = None) -> Recording:
    """Read the run from its events file; `spec`: default: `spec.json` beside the file.

    Of a step that was repeated after a resume the later one counts.

    Raises:
        RecordingError: the file is no events file, begins after step 1, has steps without a timeline or is from one of several
            ranks; or its spec is missing.
    """
    started, metrics, timelines = None, dict[int, Mapping[str, float]](), dict[int, SpansEvent]()
    for event in _events(file):
        if isinstance(event, StartedEvent):
            started = event
        elif isinstance(event, StepEvent):
            metrics[event.step] = event.metrics
        elif isinstance(event, SpansEvent):
            timelines[event.step] = event
    if started is None:
        raise RecordingError(f"{file} records no complete step")
    return recorded(str(file), spec or _spec_beside(file), started, metrics, timelines)


def recorded(
    source: str,
    spec: RunSpec,
    started: StartedEvent,
    metrics: Mapping[int, Mapping[str, float]],
    timelines: Mapping[int, SpansEvent],
) -> Recording:
    """The recording of a run from its metrics (at least `METRICS`) and timelines by step; `source` names it in errors.

    Raises:
        RecordingError: as `read_recording`.
    """
    if not metrics:
        raise RecordingError(f"{source} records no complete step")
    if spec.resources.ranks > 1:
        raise RecordingError(
            f"{source} is from one of {spec.resources.ranks} ranks; a replay needs all answers, so a run of one rank"
        )
    recording = Recording(spec, started)
    for number in range(1, max(metrics) + 1):
        if number not in metrics:
            raise RecordingError(f"{source} lacks step {number}; a replay needs the run from its first step on")
        if number not in timelines or not timelines[number].trained:
            raise RecordingError(f"{source} has no timeline with answer lengths for step {number}; set logging.spans_every to 1")
        _add(recording, metrics[number], timelines[number])
    return recording


def _add(recording: Recording, metrics: Mapping[str, float], timeline: SpansEvent) -> None:
    for sequence_id, prompt, response in timeline.trained:
        recording.lengths[sequence_id], recording.prompts[sequence_id] = response, prompt
    first = recording.devices_of("actor")[0]
    decoding = {device for device, phase in zip(timeline.device, timeline.phase, strict=True) if phase == "decode"}
    recording.decodes_on = max(recording.decodes_on, len(decoding))
    recording.steps.append(
        RecordedStep(
            timeline.window_s, round(metrics[OVERCOMMIT]), round(metrics[CHUNK]),
            sum(response for _, _, response in timeline.trained), spans_by_key(timeline),
            sum(end - start for device, cause, start, end in timeline.idle if (device, cause) == (first, "unknown")),
        )
    )  # fmt: skip


def spans_by_key(timeline: SpansEvent) -> dict[Key, tuple[float, float]]:
    """(start, end) of every span; spans that differ in their device alone count once."""
    columns = (timeline.start_s, timeline.end_s, timeline.role, timeline.phase, timeline.chunk)
    counts: dict[tuple[Role, Phase, int], int] = defaultdict(int)
    spans: dict[Key, tuple[float, float]] = {}
    for start, end, role, phase, chunk in sorted(set(zip(*columns, strict=True))):
        number = counts[role, phase, chunk]
        counts[role, phase, chunk] += 1
        spans[timeline.step, role, phase, chunk, number] = (start, end)
    return spans


def _events(file: Path) -> Iterator[Event]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    return  # still being written
                try:
                    yield parse_event(line)
                except ValueError as error:
                    raise RecordingError(f"{file}, line {number}, is not an event: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise RecordingError(f"{file} cannot be read: {error.strerror}") from None


def _spec_beside(file: Path) -> RunSpec:
    path = file.with_name("spec.json")
    try:
        return load_stored_spec(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, SpecError) as error:
        raise RecordingError(f"the run's spec is not beside its events ({path}: {error}); give it as well") from None
