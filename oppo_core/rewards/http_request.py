"""One HTTP request to a reward service: a single attempt with a time limit, and the pause (exponential backoff) after it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx

from oppo_contract.spec import HttpReward
from oppo_core.rewards.response_schema import BadResponseError, excerpt, parse_scores
from oppo_core.rng import Use, generator

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 20.0
# These statuses are temporary; any other 4xx is the request's fault and final.
TEMPORARY_STATUSES = {408, 425, 429}
RESPONSE_BYTES = 16_384
RESPONSE_BYTES_PER_ANSWER = 256


@dataclass(frozen=True, slots=True)
class Request:
    """Answers in one request. `number` counts a source's requests and seeds the jitter of its pauses."""

    number: int
    sequence_ids: list[int]
    body: bytes


class AttemptError(Exception):
    """An attempt without scores. `final`: a retry would fail, too; `pause_s`: requested by the service, seconds."""

    def __init__(self, reason: str, final: bool = False, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.final = final
        self.pause_s = pause_s


class RewardClient:
    """Sends requests. Redirects are not followed: they would bypass the list of allowed hosts."""

    def __init__(self, client: httpx.AsyncClient, url: httpx.URL, token: str | None, http: HttpReward, seed: int) -> None:
        self._client, self._url, self._token, self._http, self._seed = client, url, token, http, seed

    def pause_s(self, request: Request, attempts: int, failure: AttemptError) -> float:
        """Seconds before the next attempt: doubling, times 0.5 to 1.5 drawn from (seed, request, attempts), within limits."""
        jitter = float(generator(self._seed, Use.RETRIES, (request.number << 16) + attempts).random())
        pause = FIRST_PAUSE_S * 2 ** min(attempts - 1, 16) * (0.5 + jitter)
        return float(min(max(pause, failure.pause_s), LONGEST_PAUSE_S))

    async def attempt(self, request: Request) -> list[float]:
        """Send a request once and return its scores. Raises AttemptError without valid scores."""
        headers = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        try:
            # httpx limits each wait on the socket, which a service that sends a byte now and then would never exceed.
            async with (
                asyncio.timeout(self._http.timeout_s),
                self._client.stream("POST", self._url, content=request.body, headers=headers) as response,
            ):
                body, complete = await _read(response, RESPONSE_BYTES + RESPONSE_BYTES_PER_ANSWER * len(request.sequence_ids))
        except TimeoutError:
            raise AttemptError(f"no response within {self._http.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise AttemptError(f"{type(error).__name__}: {error}") from None
        return self._parse(response, body, complete, len(request.sequence_ids))

    def _parse(self, response: httpx.Response, body: bytes, complete: bool, count: int) -> list[float]:
        status = response.status_code
        reason = f"HTTP {status}, response {excerpt(body, self._token)}"
        if response.is_redirect:
            raise AttemptError(f"{reason}; redirects are not followed: use the final URL", final=True)
        if not response.is_success:
            raise AttemptError(reason, final=status < 500 and status not in TEMPORARY_STATUSES, pause_s=_retry_after(response))
        if not complete:
            raise AttemptError(f"{reason}; the response has more than {len(body)} bytes")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise AttemptError(f"{reason}; the response is compressed, although the request did not accept that")
        try:
            return parse_scores(body, count)
        except BadResponseError as error:
            raise AttemptError(f"{reason}; {error}") from None


async def _read(response: httpx.Response, limit: int) -> tuple[bytes, bool]:
    """A response's body up to `limit` bytes, and whether that is all of it."""
    body = b""
    async for part in response.aiter_raw():
        body += part
        if len(body) > limit:
            return body[:limit], False
    return body, True


def _retry_after(response: httpx.Response) -> float:
    """`Retry-After` in seconds; its date form is ignored, because it depends on two clocks."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) < 6 else 0.0
