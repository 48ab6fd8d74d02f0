"""HTTP client for the platform's worker API (`oppo_contract.wire` lists the calls).

Only errors in the forms of `oppo_contract.wire` are final. Others are retried: a proxy returns 404 while the platform is stopped,
and a misconfigured ALLOWED_HOSTS returns 400; treating these as final would end runs and drop events.
"""

from __future__ import annotations

import functools
import ssl
from typing import TypeVar

import httpx
from pydantic import ValidationError

from oppo_contract import wire
from oppo_contract.events import WireModel

TIMEOUT_S = 10.0
Reply = TypeVar("Reply", bound=WireModel)


class Unreachable(Exception):
    """No response, or not a final one from the platform: retry, after `retry_after_s` if given."""

    def __init__(self, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class RefusedError(Exception):
    """The platform rejects this call for good. `reason` is one of `Refused.reason`, or `unauthorized`."""

    def __init__(self, detail: str, reason: str) -> None:
        super().__init__(detail)
        self.reason = reason


class UnacceptableError(Exception):
    """The body is too large or invalid; do not retry it."""


class GapError(Exception):
    """Events are missing before the batch."""

    def __init__(self, gap: wire.Gap) -> None:
        super().__init__(gap.detail)
        self.expected_seq = gap.expected_seq


@functools.cache
def tls_context() -> ssl.SSLContext:
    """TLS context shared by all connections, because loading the CA certificates is slow."""
    return httpx.create_ssl_context()


class PlatformApi:
    """A connection with one token. Not thread-safe.

    Every call raises `Unreachable`, `RefusedError` or `UnacceptableError`.
    """

    def __init__(self, platform_url: str, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}", wire.VERSION_HEADER: str(wire.WIRE_VERSION)}
        base_url = f"{platform_url.rstrip('/')}/api/worker/v1/"
        self._http = httpx.Client(base_url=base_url, timeout=TIMEOUT_S, headers=headers, verify=tls_context())

    def join(self, request: wire.Join) -> wire.Joined:
        """Add this node to the cluster; needs a join token."""
        return self._post("join", request, wire.Joined)

    def node_heartbeat(self, request: wire.NodeHeartbeat) -> wire.NodeOrders:
        """Report the node's state; needs the node's token, as `claim`."""
        return self._post("heartbeat", request, wire.NodeOrders)

    def claim(self, attempt_id: int, epoch: int, address: wire.Address | None = None) -> wire.Claimed:
        """wire.Claim the attempt, or this node's rank of it. `address`: for engines on other nodes."""
        return self._post(f"attempts/{attempt_id}/claim", wire.Claim(epoch=epoch, address=address), wire.Claimed)

    def attempt_heartbeat(self, attempt_id: int, request: wire.AttemptHeartbeat) -> wire.AttemptOrders:
        """Renew the lease; needs the attempt's token, as the calls below."""
        return self._post(f"attempts/{attempt_id}/heartbeat", request, wire.AttemptOrders)

    def send_events(self, attempt_id: int, body: bytes) -> int:
        """Send an `EventBatch` as JSON. Returns the high-water mark. Also raises `GapError`."""
        response = self._send(f"attempts/{attempt_id}/events", body)
        if response.status_code == httpx.codes.CONFLICT and (gap := _try_parse(wire.Gap, response)) is not None:
            raise GapError(gap)
        return _parse(response, wire.Applied).high_water

    def register_checkpoint(self, attempt_id: int, request: wire.CheckpointRegistration) -> wire.Applied:
        """Register a checkpoint."""
        return self._post(f"attempts/{attempt_id}/checkpoints", request, wire.Applied)

    def report_outcome(self, attempt_id: int, request: wire.Outcome) -> wire.Applied:
        """Report how the engine ended."""
        return self._post(f"attempts/{attempt_id}/outcome", request, wire.Applied)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _post(self, path: str, request: WireModel, reply: type[Reply]) -> Reply:
        return _parse(self._send(path, request.model_dump_json().encode()), reply)

    def _send(self, path: str, body: bytes) -> httpx.Response:
        try:
            return self._http.post(path, content=body, headers={"Content-Type": "application/json"})
        except httpx.RequestError as error:  # also a response with an invalid encoding
            raise Unreachable(f"{type(error).__name__}: {error}") from error


def _parse(response: httpx.Response, reply: type[Reply]) -> Reply:
    status = response.status_code
    if status < 300:
        try:
            return reply.model_validate_json(response.content)
        except ValidationError as error:
            raise Unreachable(f"the platform's response is invalid: {error.errors(include_url=False)[:3]}") from error
    detail = f"{status} {response.text[:500]}"
    if status == httpx.codes.REQUEST_ENTITY_TOO_LARGE:  # from a proxy too
        raise UnacceptableError(detail)
    if status == httpx.codes.CONFLICT and (refused := _try_parse(wire.Refused, response)) is not None:
        raise RefusedError(refused.detail, refused.reason)
    if _is_problem(response):
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND):
            raise RefusedError(detail, "unauthorized")
        if status == httpx.codes.UNPROCESSABLE_ENTITY:
            raise UnacceptableError(detail)
    raise Unreachable(detail, _retry_after(response))


def _try_parse(model: type[Reply], response: httpx.Response) -> Reply | None:
    """The body as `model`; None if it is invalid."""
    try:
        return model.model_validate_json(response.content)
    except ValidationError:
        return None


def _is_problem(response: httpx.Response) -> bool:
    """Whether the body is the platform's problem details, with request id and status."""
    if response.headers.get("Content-Type", "").partition(";")[0].strip() != wire.PROBLEM_TYPE:
        return False
    try:
        problem = response.json()
    except ValueError:
        return False
    return isinstance(problem, dict) and problem.get("status") == response.status_code and "request_id" in problem


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.replace(".", "", 1).isdigit() else None
