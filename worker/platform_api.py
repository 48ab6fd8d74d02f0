"""The platform's worker interface as Python calls (`oppo_contract.wire` has the table). Every failure has one of three names.

Only the platform's own word is final, in the forms that `oppo_contract.wire` promises. A proxy says 404 while the platform is
stopped, and a platform that was not told its own name says 400: taking that for a refusal would end runs and drop their events.
"""

from __future__ import annotations

import functools
import ssl
from types import TracebackType
from typing import TypeVar

import httpx
from pydantic import ValidationError

from oppo_contract.events import WireModel
from oppo_contract.wire import (
    PROBLEM_TYPE,
    VERSION_HEADER,
    WIRE_VERSION,
    Address,
    Applied,
    AttemptHeartbeat,
    AttemptOrders,
    CheckpointRegistration,
    Claim,
    Claimed,
    Gap,
    Join,
    Joined,
    NodeHeartbeat,
    NodeOrders,
    Outcome,
    Refused,
)

TIMEOUT_S = 10.0
Reply = TypeVar("Reply", bound=WireModel)


class Unreachable(Exception):
    """Nobody answered, or not the platform, or it could not serve us now: try again, after `retry_after_s` if it said so."""

    def __init__(self, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class RefusedError(Exception):
    """Decided elsewhere: this call will never succeed. `reason` is one of `Refused.reason`, or `unauthorized`."""

    def __init__(self, detail: str, reason: str) -> None:
        super().__init__(detail)
        self.reason = reason


class UnacceptableError(Exception):
    """The body is too large or not understood; sending the same again is useless."""


class GapError(Exception):
    """Events are missing before the batch."""

    def __init__(self, gap: Gap) -> None:
        super().__init__(gap.detail)
        self.expected_seq = gap.expected_seq


@functools.cache
def tls() -> ssl.SSLContext:
    """What connections are secured with; reading the certificates takes a while, so all share one."""
    return httpx.create_ssl_context()


class PlatformApi:
    """A connection with one token. Not thread-safe: each thread opens its own.

    Every call raises `Unreachable`, `RefusedError` or `UnacceptableError`.
    """

    def __init__(self, platform_url: str, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}", VERSION_HEADER: str(WIRE_VERSION)}
        base_url = f"{platform_url.rstrip('/')}/api/worker/v1/"
        self._http = httpx.Client(base_url=base_url, timeout=TIMEOUT_S, headers=headers, verify=tls())

    def join(self, request: Join) -> Joined:
        """Become a node of the cluster; the token must be a join token."""
        return self._post("join", request, Joined)

    def node_heartbeat(self, request: NodeHeartbeat) -> NodeOrders:
        """Report the node; the token must be the node's, here and in `claim`."""
        return self._post("heartbeat", request, NodeOrders)

    def claim(self, attempt_id: int, epoch: int, address: Address | None = None) -> Claimed:
        """Take the attempt, or one of its launches, once and for good; `address`: where engines on other nodes find this one."""
        return self._post(f"attempts/{attempt_id}/claim", Claim(epoch=epoch, address=address), Claimed)

    def attempt_heartbeat(self, attempt_id: int, request: AttemptHeartbeat) -> AttemptOrders:
        """Renew the lease; the token must be the attempt's, here and below."""
        return self._post(f"attempts/{attempt_id}/heartbeat", request, AttemptOrders)

    def send_events(self, attempt_id: int, body: bytes) -> int:
        """Send an `EventBatch` as JSON; returns the high-water mark. Raises also `GapError`."""
        response = self._send(f"attempts/{attempt_id}/events", body)
        if response.status_code == httpx.codes.CONFLICT and (gap := _as(Gap, response)) is not None:
            raise GapError(gap)
        return _read(response, Applied).high_water

    def register_checkpoint(self, attempt_id: int, request: CheckpointRegistration) -> Applied:
        """Make a checkpoint count."""
        return self._post(f"attempts/{attempt_id}/checkpoints", request, Applied)

    def report_outcome(self, attempt_id: int, request: Outcome) -> Applied:
        """Say how the engine ended."""
        return self._post(f"attempts/{attempt_id}/outcome", request, Applied)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> PlatformApi:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _post(self, path: str, request: WireModel, reply: type[Reply]) -> Reply:
        return _read(self._send(path, request.model_dump_json().encode()), reply)

    def _send(self, path: str, body: bytes) -> httpx.Response:
        try:
            return self._http.post(path, content=body, headers={"Content-Type": "application/json"})
        except httpx.RequestError as error:  # also an answer that is not encoded as it says
            raise Unreachable(f"{type(error).__name__}: {error}") from error


def _read(response: httpx.Response, reply: type[Reply]) -> Reply:
    status = response.status_code
    if status < 300:
        try:
            return reply.model_validate_json(response.content)
        except ValidationError as error:
            raise Unreachable(f"the platform's response is invalid: {error.errors(include_url=False)[:3]}") from error
    said = f"{status} {response.text[:500]}"
    if status == httpx.codes.REQUEST_ENTITY_TOO_LARGE:  # whoever sets the limit
        raise UnacceptableError(said)
    if status == httpx.codes.CONFLICT and (refused := _as(Refused, response)) is not None:
        raise RefusedError(refused.detail, refused.reason)
    if _is_problem(response):
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND):
            raise RefusedError(said, "unauthorized")
        if status == httpx.codes.UNPROCESSABLE_ENTITY:
            raise UnacceptableError(said)
    raise Unreachable(said, _retry_after(response))


def _as(form: type[Reply], response: httpx.Response) -> Reply | None:
    """The body in one of the contract's forms; None when it is in another."""
    try:
        return form.model_validate_json(response.content)
    except ValidationError:
        return None


def _is_problem(response: httpx.Response) -> bool:
    """Whether the platform itself has refused: its problem details name the request, and repeat the status."""
    if response.headers.get("Content-Type", "").partition(";")[0].strip() != PROBLEM_TYPE:
        return False
    try:
        told = response.json()
    except ValueError:
        return False
    return isinstance(told, dict) and told.get("status") == response.status_code and "request_id" in told


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.replace(".", "", 1).isdigit() else None
