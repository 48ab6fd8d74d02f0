"""The worker's HTTP interface, `/api/worker/v1/…`: one model a body, in both directions.

| call | token | request | reply |
|---|---|---|---|
| POST join | join | Join | Joined |
| POST heartbeat | node | NodeHeartbeat | NodeOrders |
| POST attempts/{id}/claim | node | Claim | Claimed, 409 Refused |
| POST attempts/{id}/heartbeat | attempt | AttemptHeartbeat | AttemptOrders, 409 Refused when fenced |
| POST attempts/{id}/events | attempt | EventBatch | Applied, 409 Gap, 413, 429 with Retry-After |
| POST attempts/{id}/checkpoints | attempt | CheckpointRegistration | Applied, 409 Refused |
| POST attempts/{id}/outcome | attempt | Outcome | Applied, 409 Refused |

Tokens travel as `Authorization: Bearer …`. A 409 is final for that call: what it refuses has been decided elsewhere. Every other
refusal is a problem (RFC 9457) of the type below with the keys `status` and `request_id`: 401, 403 and 404 are final, 422 is so
for its body, and after any other status the call is made again. What has neither form is not the platform's word but a proxy's:
the call is made again, with less at a time after a 413.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer

from oppo_contract.events import Event, WireModel

WIRE_VERSION = 4
# The platform serves workers of this version and of the one before. Others get no work, which the page of nodes tells, and what
# runs on them goes on. Update the platform first.
SUPPORTED_VERSIONS = (WIRE_VERSION - 1, WIRE_VERSION)
# From version 2 on every call of a worker names its version, so that a platform can tell what a newer one added.
VERSION_HEADER = "OPPO-Wire-Version"
PROBLEM_TYPE = "application/problem+json"
# Fields that came after version 1. What an older worker does not know is left out of replies to it: it takes no surprises.
ADDED_IN_VERSION: dict[tuple[str, str], int] = {
    ("DeviceReport", "health"): 2,
    ("Claim", "address"): 3,
    ("Claimed", "rendezvous"): 3,
    ("NodeHeartbeat", "deleted"): 4,
    ("NodeHeartbeat", "disks"): 4,
    ("NodeOrders", "delete"): 4,
    ("AttemptOrders", "spare"): 4,
}
MAX_BATCH_BYTES = 4 * 1024 * 1024
MAX_BATCH_EVENTS = 1000
HEARTBEAT_S = 2.0
MAX_ARCHITECTURE = 200  # characters
MAX_TOKENS = 2**31 - 1  # of a model's context or vocabulary: what the platform's columns hold


class DeviceReport(WireModel):
    """A device as its node sees it."""

    index: int = Field(ge=0)
    kind: Literal["cpu", "cuda"]
    model: str = Field(description="Empty, with `memory_bytes` 0, for a GPU that the driver has lost; `health` says so.")
    memory_bytes: int = Field(ge=0)
    busy_share: float | None = Field(None, description="NVML utilization, or the CPU's load, 0 to 1; None when unknown.")
    health: str = Field("", max_length=500, description="Why it should not be given away, for people; empty: nothing is known.")


def encode_reply(message: WireModel, version: int) -> bytes:
    """A reply as JSON in the words of a worker's version."""
    name = type(message).__name__
    newer = {field for (model, field), since in ADDED_IN_VERSION.items() if model == name and since > version}
    return message.model_dump_json(exclude=newer).encode()


class CatalogueEntry(WireModel):
    """A model or a set of prompts under a worker's roots; `id` is its path below the root, with forward slashes."""

    id: str = Field(min_length=1, max_length=1024)
    kind: Literal["model", "prompts"]
    bytes: int = Field(ge=0)
    architecture: str = Field("", max_length=MAX_ARCHITECTURE)
    task: Literal["causal_lm", "sequence_classification", ""] = ""
    tokenizer_digest: str = Field("", description="SHA-256 of tokenizer.json; equal digests mean equal tokens.")
    context: int = Field(0, ge=0, le=MAX_TOKENS, description="Tokens; 0: not known, here and below.")
    vocab: int = Field(0, ge=0, le=MAX_TOKENS)
    rows: int = Field(0, ge=0)


class Join(WireModel):
    """A node asks to belong to the cluster. Joining again under the same name replaces its token."""

    wire_version: int = WIRE_VERSION
    name: str = Field(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    hostname: str
    cpus: int = Field(ge=1)
    memory_bytes: int = Field(ge=0)


class Joined(WireModel):
    """The node's identity: keep `node_token` in a 0600 file."""

    node_id: int
    node_token: str
    queue: str = Field(description="Celery queue to consume.")
    broker_url: str
    artifact_root: str = Field("", description="Where this cluster keeps artifacts, as a file:// URL on a shared path.")


class RunningAttempt(WireModel):
    """An attempt whose supervisor lives on the node."""

    attempt_id: int
    epoch: int


class DeletionResult(WireModel):
    """A folder that was to be deleted is not there any more; with `error`, it could not be deleted, and why."""

    id: int
    error: str = Field("", max_length=2000)


class DiskReport(WireModel):
    """The file system that a folder of the worker lies on."""

    what: Literal["artifacts", "outbox"]
    path: str = Field(max_length=2000)
    free_bytes: int = Field(ge=0, description="As far as the worker may fill it.")
    total_bytes: int = Field(ge=0)


class NodeHeartbeat(WireModel):
    """Every two seconds. `catalogue` is sent when it changed or was asked for."""

    wire_version: int = WIRE_VERSION
    devices: list[DeviceReport]
    attempts: list[RunningAttempt]
    catalogue: list[CatalogueEntry] | None = None
    deleted: list[DeletionResult] = Field(default_factory=list, description="What became of `NodeOrders.delete`.")
    disks: list[DiskReport] = Field(default_factory=list)


class LaunchOrder(WireModel):
    """Start a supervisor for this attempt. Also the body of the Celery message."""

    attempt_id: int
    epoch: int


class DeletionOrder(WireModel):
    """Delete this folder of a run's artifacts, and say so with the next heartbeat. It is told until then."""

    id: int
    run_id: int
    url: str = Field(description="file://… below the node's artifact root.")


class NodeOrders(WireModel):
    """What the node should do now."""

    unclaimed: list[LaunchOrder]
    stop: list[LaunchOrder] = Field(default_factory=list, description="Attempts the node runs but no longer owns.")
    catalogue_wanted: bool = False
    delete: list[DeletionOrder] = Field(default_factory=list)


class Address(WireModel):
    """Where a process on a node is reached by those on other nodes."""

    host: str = Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:_-]*$")
    port: int = Field(ge=1, le=65535)


class Claim(WireModel):
    """Compare-and-set: works once, for each node that the attempt is allocated to, under the current epoch."""

    epoch: int
    address: Address | None = Field(
        None, description="A free port of this node: the engines meet there if the attempt is on several and this is the first."
    )


class CheckpointRef(WireModel):
    """A registered checkpoint."""

    step: int
    url: str
    manifest_sha256: str


class Rendezvous(WireModel):
    """How the engines of an attempt on several nodes find each other: `torchrun`'s arguments."""

    nodes: int = Field(ge=2)
    node_rank: int = Field(ge=0)
    address: Address = Field(description="The first node's.")
    deadline_s: float = Field(description="Who has not come by then is waited for no longer, seconds.")


class Claimed(WireModel):
    """All that a supervisor needs. The spec is the run's, checked."""

    attempt_token: str
    run_id: int
    spec: dict[str, object]
    device_indices: list[int]
    lease_s: float
    artifact_url: str = Field(description="Folder for this run's checkpoints, file://….")
    resume_from: CheckpointRef | None = None
    rendezvous: Rendezvous | None = Field(None, description="Only for an attempt on several nodes.")
    secrets: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="Variables of the engine's environment. Kept out of logs, events, and all files but private ones.",
    )

    @model_serializer(mode="wrap")
    def _older_workers_know_no_secrets(self, whole: SerializerFunctionWrapHandler) -> dict[str, object]:
        told: dict[str, object] = whole(self)
        return told if self.secrets else {name: value for name, value in told.items() if name != "secrets"}


class AttemptHeartbeat(WireModel):
    """Renews the lease; the first one with `running` moves the run from starting to running."""

    epoch: int
    running: bool = False


class AttemptOrders(WireModel):
    """`signal` stands until it is obeyed; `deadline_s` is what is left of its time, then the engine is killed."""

    lease_s: float
    signal: Literal["cancel", "pause", "preempt"] | None = None
    deadline_s: float = 5.0
    spare: list[str] = Field(
        default_factory=list,
        description="Folders of the run's checkpoints that are kept, because others are about to begin with them.",
    )


class EventBatch(WireModel):
    """Consecutive events of one producer, oldest first."""

    producer: Literal["engine", "supervisor"]
    events: list[Event] = Field(min_length=1, max_length=MAX_BATCH_EVENTS)


class Applied(WireModel):
    """`high_water` is the last number applied; events at or below it are never applied again."""

    high_water: int = 0


class Gap(WireModel):
    """Events are missing before the batch: send from `expected_seq` on."""

    detail: str
    expected_seq: int


class Refused(WireModel):
    """Decided elsewhere; `reason` is a sentence for the log."""

    detail: str
    reason: Literal["stale_epoch", "already_claimed", "not_your_node", "ended", "lease_lost", "unknown_checkpoint"]


class CheckpointRegistration(WireModel):
    """A checkpoint counts once it is registered under the current epoch."""

    epoch: int
    step: int = Field(ge=0)
    url: str
    manifest_sha256: str
    bytes: int = Field(ge=0)


def _without_nul(text: str) -> str:
    return text.replace("\0", "\ufffd")


# What an engine said last may quote anything, an answer that it read for example; a database's text holds no NUL.
Said = Annotated[str, AfterValidator(_without_nul)]


class Outcome(WireModel):
    """How the engine ended. The node's devices are free when this is sent: no process is left on them."""

    epoch: int
    outcome: Literal["succeeded", "failed", "cancelled", "paused", "preempted", "engine_died"]
    exit_code: int | None = None
    reason: Said = Field(max_length=4000)
    last_log_lines: list[Said] = Field(default_factory=list, max_length=200)
