"""Wire format between worker and platform, `/api/worker/v1/…`: one model per request and response body.

| call | token | request | reply |
|---|---|---|---|
| POST join | join | Join | Joined |
| POST heartbeat | node | NodeHeartbeat | NodeOrders |
| POST attempts/{id}/claim | node | Claim | Claimed, 409 Refused |
| POST attempts/{id}/heartbeat | attempt | AttemptHeartbeat | AttemptOrders, 409 Refused when fenced |
| POST attempts/{id}/events | attempt | EventBatch | Applied, 409 Gap, 413, 429 with Retry-After |
| POST attempts/{id}/checkpoints | attempt | CheckpointRegistration | Applied, 409 Refused |
| POST attempts/{id}/outcome | attempt | Outcome | Applied, 409 Refused |

Tokens are sent as `Authorization: Bearer …`. A 409 with a body above is final for the call. Other errors are problem details
(RFC 9457) with the keys `status` and `request_id`: 401, 403 and 404 are final, 422 is final for its body, others are retried.
A response in neither form comes from a proxy and is retried; after a 413, with smaller batches.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer

from oppo_contract.events import Event, WireModel

WIRE_VERSION = 5
# The platform serves workers of this version and the one before. Others get no new attempts (the nodes page says so); their
# running attempts continue. Update the platform first.
SUPPORTED_VERSIONS = (WIRE_VERSION - 1, WIRE_VERSION)
# Sent with every call of a worker from version 2 on.
VERSION_HEADER = "OPPO-Wire-Version"
PROBLEM_TYPE = "application/problem+json"
# Fields added after version 1. Replies to an older worker omit them, because it rejects unknown keys.
ADDED_IN_VERSION: dict[tuple[str, str], int] = {
    ("DeviceReport", "health"): 2,
    ("Claim", "address"): 3,
    ("Claimed", "rendezvous"): 3,
    ("CatalogueEntry", "weights"): 4,
    ("CatalogueEntry", "problem"): 4,
    ("CatalogueEntry", "layers"): 5,
    ("CatalogueEntry", "width"): 5,
    ("CatalogueEntry", "cached"): 5,
    ("NodeHeartbeat", "deleted"): 4,
    ("NodeHeartbeat", "disks"): 4,
    ("NodeOrders", "delete"): 4,
    ("AttemptOrders", "spare"): 4,
    ("NodeHeartbeat", "time"): 5,
}
MAX_BATCH_BYTES = 4 * 1024 * 1024
MAX_BATCH_EVENTS = 1000
HEARTBEAT_S = 2.0
MAX_ARCHITECTURE = 200  # characters
MAX_ID = 1024  # characters, as MAX_PROBLEM
MAX_PROBLEM = 2000
ANY_HUB_MODEL = "any model"
MAX_TOKENS = 2**31 - 1  # context or vocabulary of a model; the range of the database columns


class DeviceReport(WireModel):
    """A device as reported by its node."""

    index: int = Field(ge=0)
    kind: Literal["cpu", "cuda"]
    model: str = Field(description="Empty, with `memory_bytes` 0, for a GPU that the driver cannot access.")
    memory_bytes: int = Field(ge=0)
    busy_share: float | None = Field(None, description="NVML utilization, or the CPU's load, 0 to 1; None when unknown.")
    health: str = Field("", max_length=500, description="Why it should not be allocated, as text; empty: no known problem.")


class CatalogueEntry(WireModel):
    """A model or prompts below a worker's roots; `id` is the path below the root, with forward slashes.

    Kind `hub` with the id `any model` says that the worker downloads models by hub id. Kinds `rule` and `reward_host` (from
    version 5 on): an installed rule, and a reward service that runs may use, as `host` (ports 80 and 443) or `host:port`. An
    entry with a `problem` is listed and refused at submit.
    """

    id: str = Field(min_length=1, max_length=MAX_ID)
    kind: Literal["model", "prompts", "hub", "rule", "reward_host"]
    bytes: int = Field(ge=0)
    architecture: str = Field("", max_length=MAX_ARCHITECTURE)
    task: Literal["causal_lm", "sequence_classification", ""] = ""
    tokenizer_digest: str = Field("", description="Digest of tokenizer.json; equal digests mean equal tokens.")
    context: int = Field(0, ge=0, le=MAX_TOKENS, description="Tokens; 0: unknown, here and below.")
    vocab: int = Field(0, ge=0, le=MAX_TOKENS)
    rows: int = Field(0, ge=0)
    weights: int = Field(0, ge=0, le=2**63 - 1, description="Numbers in a model's safetensors.")
    layers: int = Field(0, ge=0, le=MAX_TOKENS, description="Of a model, as in its config.json; the platform's plan needs them.")
    width: int = Field(0, ge=0, le=MAX_TOKENS, description="Hidden size.")
    cached: int = Field(0, ge=0, le=MAX_TOKENS, description="Numbers in its KV cache per token.")
    problem: str = Field("", max_length=MAX_PROBLEM, description="Why no run can use it, as text; empty: no known problem.")


class Join(WireModel):
    """Add a node to the cluster. Joining again under the same name replaces its token."""

    wire_version: int = WIRE_VERSION
    name: str = Field(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    hostname: str
    cpus: int = Field(ge=1)
    memory_bytes: int = Field(ge=0)


class Joined(WireModel):
    """The node's identity; `node_token` is stored in a 0600 file."""

    node_id: int
    node_token: str
    queue: str = Field(description="Celery queue to consume.")
    broker_url: str
    artifact_root: str = Field("", description="Artifact root of the cluster, a file:// URL on a shared path.")


class RunningAttempt(WireModel):
    """An attempt whose supervisor runs on the node."""

    attempt_id: int
    epoch: int


class DeletionResult(WireModel):
    """Result of a `DeletionOrder`: deleted, or `error` says why not."""

    id: int
    error: str = Field("", max_length=2000)


class DiskReport(WireModel):
    """The file system of one of the worker's folders."""

    what: Literal["artifacts", "outbox"]
    path: str = Field(max_length=2000)
    free_bytes: int = Field(ge=0, description="Bytes available to the worker.")
    total_bytes: int = Field(ge=0)


class NodeHeartbeat(WireModel):
    """Sent every two seconds. `catalogue` is included if it changed or was requested."""

    wire_version: int = WIRE_VERSION
    devices: list[DeviceReport]
    attempts: list[RunningAttempt]
    catalogue: list[CatalogueEntry] | None = None
    deleted: list[DeletionResult] = Field(default_factory=list, description="Results of `NodeOrders.delete`.")
    disks: list[DiskReport] = Field(default_factory=list)
    time: float | None = Field(None, description="The node's clock, seconds since 1970.")


class LaunchOrder(WireModel):
    """Start a supervisor for this attempt. Also the body of the Celery message."""

    attempt_id: int
    epoch: int


class DeletionOrder(WireModel):
    """Delete this artifact folder and report it with the next heartbeat. Repeated until then."""

    id: int
    run_id: int
    url: str = Field(description="file://… below the node's artifact root.")


class NodeOrders(WireModel):
    """Orders for the node, the reply to its heartbeat."""

    unclaimed: list[LaunchOrder]
    stop: list[LaunchOrder] = Field(default_factory=list, description="Attempts the node runs but no longer owns.")
    catalogue_wanted: bool = False
    delete: list[DeletionOrder] = Field(default_factory=list)


class Address(WireModel):
    """Network address of a process on a node, for other nodes."""

    host: str = Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:_-]*$")
    port: int = Field(ge=1, le=65535)


class Claim(WireModel):
    """Compare-and-set: succeeds once per allocated node, under the current epoch."""

    epoch: int
    address: Address | None = Field(
        None, description="A free port of this node: the master address if the attempt has several nodes and this is the first."
    )


class CheckpointRef(WireModel):
    """A registered checkpoint."""

    step: int
    url: str
    manifest_sha256: str


class Rendezvous(WireModel):
    """Arguments of `torchrun` for an attempt on several nodes."""

    nodes: int = Field(ge=2)
    node_rank: int = Field(ge=0)
    address: Address = Field(description="The first node's.")
    deadline_s: float = Field(description="Timeout for all nodes to join, seconds.")


class Claimed(WireModel):
    """The attempt's data for its supervisor. `spec` is validated."""

    attempt_token: str
    run_id: int
    spec: dict[str, object]
    device_indices: list[int]
    lease_s: float
    artifact_url: str = Field(description="Artifact folder of the run, file://….")
    resume_from: CheckpointRef | None = None
    rendezvous: Rendezvous | None = Field(None, description="Only for an attempt on several nodes.")
    secrets: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="Variables for the engine's environment. Not written to logs, events, or files that others can read.",
    )

    @model_serializer(mode="wrap")
    def _omit_empty_secrets(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Older workers reject the key."""
        fields: dict[str, object] = serialize(self)
        return fields if self.secrets else {name: value for name, value in fields.items() if name != "secrets"}


class AttemptHeartbeat(WireModel):
    """Renew the lease; the first one with `running` moves the run from starting to running."""

    epoch: int
    running: bool = False


class AttemptOrders(WireModel):
    """`signal` is repeated until the engine has ended; the engine is killed after `deadline_s`."""

    lease_s: float
    signal: Literal["cancel", "pause", "preempt"] | None = None
    deadline_s: float = 5.0
    spare: list[str] = Field(
        default_factory=list,
        description="Checkpoint folders of the run not to delete, because other runs are about to start from them.",
    )


class EventBatch(WireModel):
    """Consecutive events of one producer, oldest first."""

    producer: Literal["engine", "supervisor"]
    events: list[Event] = Field(min_length=1, max_length=MAX_BATCH_EVENTS)


class Applied(WireModel):
    """`high_water` is the last sequence number applied; events up to it are ignored when repeated."""

    high_water: int = 0


class Gap(WireModel):
    """Events before the batch are missing: send from `expected_seq` on."""

    detail: str
    expected_seq: int


class Refused(WireModel):
    """The call is rejected for good; `detail` is a sentence for the log."""

    detail: str
    reason: Literal["stale_epoch", "already_claimed", "not_your_node", "ended", "lease_lost", "unknown_checkpoint"]


class CheckpointRegistration(WireModel):
    """Register a checkpoint under the current epoch, so that the run can resume from it."""

    epoch: int
    step: int = Field(ge=0)
    url: str
    manifest_sha256: str
    bytes: int = Field(ge=0)


def _without_nul(text: str) -> str:
    return text.replace("\0", "\ufffd")


# Text of the engine may quote any response; PostgreSQL text cannot contain NUL.
EngineText = Annotated[str, AfterValidator(_without_nul)]


class Outcome(WireModel):
    """How the attempt ended. Sent when no process of the engine is left, so the node's devices are free.

    `node_failed` (from version 5 on): the node ended it, not the engine, such as by a full disk.
    """

    epoch: int
    outcome: Literal["succeeded", "failed", "cancelled", "paused", "preempted", "engine_died", "node_failed"]
    exit_code: int | None = None
    reason: EngineText = Field(max_length=4000)
    last_log_lines: list[EngineText] = Field(default_factory=list, max_length=200)


def encode_reply(message: WireModel, version: int) -> bytes:
    """A reply as JSON, without fields that are newer than the worker's version."""
    name = type(message).__name__
    newer = {field for (model, field), since in ADDED_IN_VERSION.items() if model == name and since > version}
    return message.model_dump_json(exclude=newer).encode()
