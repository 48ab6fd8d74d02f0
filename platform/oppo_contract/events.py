"""Telemetry events of an attempt: an envelope (producer, seq, time) and one kind of payload.

A producer (the engine or its supervisor) numbers its events 1, 2, 3, …; ingest applies each number exactly once. Times are
POSIX seconds (UTC); inside `SpansEvent` and `StepEvent`, seconds since the attempt's `StartedEvent.time`. Non-finite numbers are
the strings "NaN", "Infinity" and "-Infinity", because JSON has none.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

MAX_EVENT_BYTES = 1024 * 1024
MAX_METRICS_PER_STEP = 500
MAX_CHAT_TURNS = 1000
MAX_ROLE = 100  # characters
MAX_COMMAND = 10_000  # characters
# Events dropped while the outbox is full. The supervisor signals that with a file: events file name + FULL_SUFFIX.
DETAIL_KINDS = ("spans", "samples", "log")
FULL_SUFFIX = ".full"
# With several ranks on a node, local rank 0 writes the events file; rank n writes events file name + LOCAL_RANK_SUFFIX + n.
LOCAL_RANK_SUFFIX = ".process-"
MAX_STEP = 2**31 - 1  # the range of the database column
MAX_TIME = 253_402_300_799.0  # end of the year 9999, the maximum of datetime

MetricKey = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_./:-]+$")]
ShortText = Annotated[str, Field(min_length=1, max_length=200)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Kind of work and model role (docs/metrics.md explains each).
Phase = Literal[
    "decode",
    "actor-prefill",
    "reward-prefill",
    "reference-prefill",
    "critic-prefill",
    "score",
    "advantages",
    "actor-forward",
    "update-actor",
    "update-critic",
    "weights",
    "checkpoint",
    "eval",
    "data",
]
IdleCause = Literal["decode", "tail", "score", "update", "weights", "data", "checkpoint", "eval", "unknown"]
Role = Literal["actor", "critic", "reward", "reference"]
Counter = Literal["live_rows", "waiting_handovers", "finished", "overcommit", "chunk_size"]


class WireModel(BaseModel):
    """Base of all messages and events: unknown keys are errors, non-finite floats are strings."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Envelope(WireModel):
    """Producer, sequence number and time of an event."""

    producer: Literal["engine", "supervisor"] = Field(
        description="The producer; with several nodes, each node's engine and supervisor is a producer of its own."
    )
    seq: int = Field(ge=1, description="1, 2, 3, … of this producer in this attempt.")
    time: float = Field(ge=0, le=MAX_TIME, allow_inf_nan=False, description="Seconds since 1970.")


class GitState(WireModel):
    """A git checkout."""

    commit: str = Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$", description="Its commit.")
    dirty: bool = Field(description="Whether tracked files differed from the commit.")


class Provenance(WireModel):
    """What a run was made of."""

    engine: GitState | None = Field(None, description="Checkout of the engine; null for an installed package.")
    user: GitState | None = Field(None, description="Another checkout that the engine was started in.")
    versions: dict[ShortText, ShortText] = Field(max_length=20, description="Package → version, Python among them.")
    models: dict[ShortText, Sha256] = Field(
        max_length=20,
        description="Setting → fingerprint of the model folder: SHA-256 of its files' names, sizes and sampled contents.",
    )
    prompts: Sha256 = Field(description="SHA-256 of the tokenized prompts of `data.prompts`, in file order.")
    command: str = Field(max_length=MAX_COMMAND, description="Command that repeats the run; `SPEC.yaml` is its spec.")


class StartedEvent(Envelope):
    """The engine has loaded everything and starts its first step."""

    kind: Literal["started"] = "started"
    devices: list[str] = Field(description="Names of the allocated devices, such as `cpu:0`.")
    lanes: list[tuple[str, Role]] = Field(description="(device, role) pairs, in the order they are drawn.")
    start_step: int = Field(ge=0, le=MAX_STEP, description="Steps already trained: 0, or the checkpoint's.")
    total_steps: int = Field(ge=1, le=MAX_STEP, description="Total steps.")
    provenance: Provenance | None = Field(None, description="What the run was made of; null from older engines.")
    commits: dict[str, str] = Field(
        default_factory=dict, description="Models from a hub by role, as `owner/name@commit`; resumed runs use them again."
    )


class StepEvent(Envelope):
    """One PPO step is done. `step` counts from 1."""

    kind: Literal["step"] = "step"
    step: int = Field(ge=1, le=MAX_STEP, description="The step, counted from 1.")
    elapsed_s: float = Field(description="Training time since step 0, earlier attempts included.")
    generated_tokens: int = Field(ge=0, description="Response tokens trained since step 0.")
    device_seconds: float = Field(ge=0, description="elapsed_s times the devices held.")
    metrics: dict[MetricKey, float] = Field(
        max_length=MAX_METRICS_PER_STEP, description="Name → value; docs/metrics.md has the names."
    )


class SpansEvent(Envelope):
    """The timeline of one step, by column: span i is `phase[i]` on `device[i]` from `start_s[i]` to `end_s[i]`."""

    kind: Literal["spans"] = "spans"
    step: int = Field(ge=1, le=MAX_STEP, description="The step, counted from 1.")
    window_s: tuple[float, float] = Field(description="End of the last update to end of this one.")
    device: list[str] = Field(description="Where.")
    role: list[Role] = Field(description="Model role of the work.")
    phase: list[Phase] = Field(description="Kind of work; docs/metrics.md explains each.")
    start_s: list[float] = Field(description="When it began.")
    end_s: list[float] = Field(description="When it ended.")
    chunk: list[int] = Field(description="Chunk number within the step, from 1; 0 where not applicable.")
    rows: list[int] = Field(description="Sequences worked on.")
    idle: list[tuple[str, IdleCause, float, float]] = Field(description="(device, cause, start_s, end_s) of every bubble.")
    deferred: list[DeferredSequence] = Field(description="Sequences carried into or out of this step.")
    flows: list[tuple[int, int]] = Field(default_factory=list, description="(i, j): span j processed tokens that span i decoded.")
    counters: dict[Counter, list[tuple[float, float]]] = Field(
        default_factory=dict, description="(time, value) pairs in order; a value holds until the next one."
    )
    trained: list[tuple[int, int, int]] = Field(
        default_factory=list, description="(sequence_id, prompt tokens, response tokens) of every response trained in this step."
    )


class DeferredSequence(WireModel):
    """A sequence that crosses a step boundary: decoded in this step from `start_s` to `end_s`."""

    sequence_id: int = Field(description="Its number, unique within the run.")
    age: int = Field(ge=0, description="Staleness so far, steps.")
    tokens: int = Field(ge=0, description="Response tokens so far.")
    start_s: float = Field(description="When decoding began in this step.")
    end_s: float = Field(description="When this response or decoding ended in this step.")
    trained: bool = Field(description="Whether this step trained it; otherwise it continues in the next one.")


class DecisionEvent(Envelope):
    """A controller changed or kept its value."""

    kind: Literal["decision"] = "decision"
    step: int = Field(ge=0, le=MAX_STEP, description="The step after which the decision was made.")
    controller: Literal["overcommit", "chunk", "kl", "nonfinite", "memory"] = Field(
        description="`overcommit`: of Δ; `chunk`: of C; `nonfinite`: what was done about a value that is not finite."
        " `memory`: of the padded tokens of a pass, because memory ran out."
        " The engine writes no `kl`: that coefficient is a metric."
    )
    old: float = Field(description="The value before; with `nonfinite` the step that failed.")
    new: float = Field(description="The value from now on, the same when it was kept; with `nonfinite` the step that comes next.")
    reason: str = Field(description="The reason, a sentence.")


class ChatTurn(WireModel):
    """One turn of a chat prompt. Its text is untrusted."""

    role: str = Field(
        min_length=1, max_length=MAX_ROLE, description="`system`, `user`, `assistant` or another role of the chat template."
    )
    content: str = Field(max_length=MAX_EVENT_BYTES, description="The turn's text, without the template's special tokens.")


class Sample(WireModel):
    """One trained response. Its text is untrusted."""

    sequence_id: int = Field(description="Its number in the run.")
    prompt: str = Field(description="The prompt; of a chat prompt the last user turn.")
    messages: list[ChatTurn] | None = Field(
        None, max_length=MAX_CHAT_TURNS, description="All turns of a chat prompt, in order; null for a plain prompt."
    )
    response: str = Field(description="The response.")
    stale_response: str = Field(description="The first part of the response, sampled under older policy versions.")
    score: float = Field(description="Its score, after normalisation, penalties and clipping.")
    kl: float = Field(description="KL to the reference, summed over the response, nats; 0 for an eval sample.")
    length: int = Field(description="Response tokens.")
    age: int = Field(description="Staleness: steps for which it was deferred.")
    versions: tuple[int, int] = Field(description="Oldest and newest policy version of its tokens.")
    held_out: bool = Field(False, description="An eval sample: `sequence_id` is the held-out prompt's number.")
    ending: Literal["eos", "stop", "length"] | None = Field(
        None, description="Finish reason: end-of-sequence, a stop condition, or the length limit; unknown in older runs."
    )


class SamplesEvent(Envelope):
    """Sampled responses of a step."""

    kind: Literal["samples"] = "samples"
    step: int = Field(ge=0, le=MAX_STEP, description="The step that trained them, or after which they were evaluated.")
    samples: list[Sample] = Field(description="The samples.")


class CheckpointEvent(Envelope):
    """A checkpoint is complete on disk; `folder` is relative to the run's artifact folder."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: int = Field(ge=0, le=MAX_STEP, description="Steps done.")
    folder: str = Field(description="Path relative to the run's artifact folder.")
    manifest_sha256: str = Field(description="SHA-256 of its `manifest.json`, which has the checksums of the files.")
    bytes: int = Field(ge=0, description="Size of all its files.")
    score: float | None = Field(
        None, description="Score for keeping the best checkpoints: of the evaluation at `step`, otherwise the mean score."
    )
    chunk: int = Field(0, ge=0, description="Chunks already decoded of the step after `step`; 0 between two steps.")


class LogEvent(Envelope):
    """Log lines of the engine or its supervisor."""

    kind: Literal["log"] = "log"
    stream: Literal["stdout", "stderr", "supervisor"] = Field(description="The stream.")
    lines: list[str] = Field(description="The lines, without line ends.")


class DroppedEvent(Envelope):
    """Events dropped because the outbox was full; metrics and checkpoints are never dropped."""

    kind: Literal["left_out"] = "left_out"
    from_step: int = Field(ge=0, description="First step with dropped data.")
    to_step: int = Field(ge=0, description="Last step with dropped data.")
    timelines: int = Field(ge=0, description="`spans` events dropped.")
    answers: int = Field(ge=0, description="Samples dropped.")
    lines: int = Field(ge=0, description="Log lines dropped.")

    def summary(self) -> str:
        """One sentence for the run's log."""
        steps = f"step {self.to_step}" if self.from_step == self.to_step else f"steps {self.from_step} to {self.to_step}"
        counts = ((self.timelines, "timeline"), (self.answers, "sample"), (self.lines, "log line"))
        things = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count) or "nothing"
        return f"The outbox was full: of {steps}, {things} were dropped. Metrics, decisions and checkpoints are complete."


class FinishedEvent(Envelope):
    """The engine ended: all steps done, budget reached, stop requested, or an error."""

    kind: Literal["finished"] = "finished"
    outcome: Literal["succeeded", "stopped", "failed"] = Field(description="`stopped`: on request.")
    step: int = Field(description="Steps done.")
    reason: str = Field(description="Why the run ended, a sentence.")
    unconsumed: int = Field(0, ge=0, description="Sequences still in flight, kept in the final checkpoint.")


Event = Annotated[
    StartedEvent
    | StepEvent
    | SpansEvent
    | DecisionEvent
    | SamplesEvent
    | CheckpointEvent
    | LogEvent
    | DroppedEvent
    | FinishedEvent,
    Field(discriminator="kind"),
]
EVENT_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


def parse_event(line: str | bytes) -> Event:
    """Parse one line of an outbox file. Raises pydantic's ValidationError."""
    return EVENT_ADAPTER.validate_json(line)
