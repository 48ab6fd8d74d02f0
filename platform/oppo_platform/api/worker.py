"""The workers' API, `/api/worker/v1/…`; `oppo_contract.wire` has its messages."""

from __future__ import annotations

import json
from threading import BoundedSemaphore
from typing import TypeVar

from django.conf import settings
from django.db import DataError, IntegrityError
from django.http import HttpRequest, HttpResponse
from ninja import NinjaAPI
from pydantic import BaseModel, ValidationError

from oppo_contract import wire
from oppo_contract.spec_errors import SpecProblem
from oppo_platform.api.auth import AttemptAuth, JoinTokenAuth, NodeAuth, Supervisor
from oppo_platform.api.problems import install, problem
from oppo_platform.cluster import services as cluster
from oppo_platform.runs import attempts
from oppo_platform.runs.models import Attempt
from oppo_platform.runs.transitions import AttemptRefused
from oppo_platform.telemetry.ingest import SequenceGapError, ingest
from oppo_platform.usecases.node_heartbeat import fence_orphans, heartbeat

MAX_BODY_BYTES = 1024 * 1024
RETRY_AFTER_S = 1
COMPLAINTS_SHOWN = 20
STALE_EPOCH = "stale_epoch"  # constraint name in migrations `0003_fencing`

Body = TypeVar("Body", bound=BaseModel)

worker_api = NinjaAPI(title="OPPO workers", version="1", docs_url=None, openapi_url=None, urls_namespace="worker-api")
install(worker_api)
# Keeps connections free for pages when many workers catch up after an outage.
_ingest_slots = BoundedSemaphore(settings.OPPO_INGEST_SLOTS)


class TooLarge(Exception):
    """A body above its limit."""


class Malformed(Exception):
    """A body that does not follow the wire format."""

    def __init__(self, problems: list[SpecProblem]) -> None:
        self.problems = problems
        super().__init__("malformed body")


@worker_api.exception_handler(AttemptRefused)
def _refused(request: HttpRequest, error: AttemptRefused) -> HttpResponse:
    return _json(wire.Refused(detail=error.detail, reason=error.reason), 409)


@worker_api.exception_handler(IntegrityError)
def _fenced(request: HttpRequest, error: IntegrityError) -> HttpResponse:
    """A trigger's refusal of an old epoch becomes a normal refusal; everything else is an internal error."""
    parameter = getattr(error.__cause__, "diag", None)
    if parameter is None or parameter.constraint_name != STALE_EPOCH:
        raise error
    return _json(wire.Refused(detail=parameter.message_primary or "stale epoch", reason="stale_epoch"), 409)


@worker_api.exception_handler(TooLarge)
def _too_large(request: HttpRequest, error: TooLarge) -> HttpResponse:
    return problem(413, str(error))


@worker_api.exception_handler(Malformed)
def _malformed(request: HttpRequest, error: Malformed) -> HttpResponse:
    return problem(422, "The body does not match oppo_contract.wire.", error.problems)


@worker_api.post("join", auth=JoinTokenAuth())
def join(request: HttpRequest) -> HttpResponse:
    """A worker becomes a node of the cluster."""
    parameter = _read(request, wire.Join)
    if parameter.wire_version not in wire.SUPPORTED_VERSIONS:
        spoken = " and ".join(map(str, wire.SUPPORTED_VERSIONS))
        return problem(422, f"The worker uses protocol version {parameter.wire_version}, the platform supports {spoken}.")
    return _json(cluster.join(parameter), version=parameter.wire_version)


@worker_api.post("heartbeat", auth=NodeAuth())
def node_heartbeat(request: HttpRequest) -> HttpResponse:
    """Devices and catalogue in, orders out."""
    node = request.auth  # type: ignore[attr-defined]
    parameter = _read(request, wire.NodeHeartbeat, wire.MAX_BATCH_BYTES)
    orders = heartbeat(node.pk, parameter)
    fence_orphans(node.pk, {running.attempt_id for running in parameter.attempts})
    return _json(orders, version=parameter.wire_version)


@worker_api.post("attempts/{int:attempt_id}/claim", auth=NodeAuth())
def claim(request: HttpRequest, attempt_id: int) -> HttpResponse:
    """Once, for the node that the attempt is allocated to."""
    parameter = _read(request, wire.Claim)
    node = request.auth  # type: ignore[attr-defined]
    return _json(attempts.claim(node, attempt_id, parameter.epoch, parameter.address), version=node.wire_version)


@worker_api.post("attempts/{int:attempt_id}/heartbeat", auth=AttemptAuth())
def attempt_heartbeat(request: HttpRequest, attempt_id: int) -> HttpResponse:
    """Renews the lease; returns orders."""
    own = _own(request, attempt_id)
    orders = attempts.heartbeat(attempt_id, _read(request, wire.AttemptHeartbeat), own.rank)
    return _json(orders, version=own.node.wire_version)


@worker_api.post("attempts/{int:attempt_id}/events", auth=AttemptAuth())
def events(request: HttpRequest, attempt_id: int) -> HttpResponse:
    """Telemetry, exactly once; also of a fenced attempt."""
    own = _own(request, attempt_id)
    batch = _read(request, wire.EventBatch, wire.MAX_BATCH_BYTES)
    if any(event.producer != batch.producer for event in batch.events):
        return problem(422, f"A batch of {batch.producer} contains events of another producer.")
    if not _ingest_slots.acquire(blocking=False):
        answer = problem(429, "Too many batches at once; retry later.")
        answer.headers["Retry-After"] = str(RETRY_AFTER_S)
        return answer
    try:
        return _json(wire.Applied(high_water=ingest(attempt_id, batch.producer, batch.events, own.rank)))
    except SequenceGapError as gap:
        return _json(wire.Gap(detail=str(gap), expected_seq=gap.expected_seq), 409)
    except (DataError, OverflowError) as error:
        return problem(422, f"A number in the batch is out of range: {error}")
    finally:
        _ingest_slots.release()


@worker_api.post("attempts/{int:attempt_id}/checkpoints", auth=AttemptAuth())
def checkpoints(request: HttpRequest, attempt_id: int) -> HttpResponse:
    """The run resumes from this checkpoint from now on."""
    own = _own(request, attempt_id)
    attempts.register_checkpoint(attempt_id, _read(request, wire.CheckpointRegistration), own.rank)
    return _json(wire.Applied())


@worker_api.post("attempts/{int:attempt_id}/outcome", auth=AttemptAuth())
def outcome(request: HttpRequest, attempt_id: int) -> HttpResponse:
    """The engine has ended and the devices are free."""
    own = _own(request, attempt_id)
    attempts.finish(attempt_id, _read(request, wire.Outcome), own.rank)
    return _json(wire.Applied())


def _own(request: HttpRequest, attempt_id: int) -> Supervisor:
    """The supervisor, if the token is this attempt's."""
    own: Supervisor = request.auth  # type: ignore[attr-defined]
    if own.attempt_id != attempt_id:
        raise Attempt.DoesNotExist
    return own


def _read(request: HttpRequest, model: type[Body], limit: int = MAX_BODY_BYTES) -> Body:
    """The body as a model; parsed from bytes, because batches are large and frequent."""
    length = int(request.headers.get("Content-Length") or 0)
    if length > limit or len(request.body) > limit:
        raise TooLarge(f"The body is larger than {limit:,} bytes; send smaller batches.")
    try:
        return model.model_validate_json(request.body)
    except ValidationError as error:
        if _is_newer(request) and (known := _known_part(model, request.body, error)) is not None:
            return known
        parameter = error.errors(include_url=False, include_context=False, include_input=False)[:COMPLAINTS_SHOWN]
        raise Malformed([SpecProblem(".".join(map(str, e["loc"])), e["msg"]) for e in parameter]) from None


def _is_newer(request: HttpRequest) -> bool:
    version = request.headers.get(wire.VERSION_HEADER, "")
    return version.isdecimal() and len(version) < 6 and int(version) > wire.WIRE_VERSION


def _known_part(model: type[Body], body: bytes, error: ValidationError) -> Body | None:
    """A newer worker's body without keys unknown to this platform; None if it has other errors.

    A newer worker gets no work, but its running attempts continue: their leases, events and outcomes are understood.
    """
    complaints = error.errors(include_url=False, include_context=False, include_input=False)
    if any(complaint["type"] != "extra_forbidden" for complaint in complaints):
        return None
    data = json.loads(body)
    for complaint in complaints:
        *way, last = complaint["loc"]
        if not isinstance(last, str):
            return None
        holder = data
        for part in way:
            holder = holder[part]
        del holder[last]
    return model.model_validate(data)


def _json(model: wire.WireModel, status: int = 200, version: int = wire.WIRE_VERSION) -> HttpResponse:
    return HttpResponse(wire.encode_reply(model, version), status=status, content_type="application/json")
