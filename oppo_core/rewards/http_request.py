"""One request to a reward service: several tries with exponential backoff, each with a time limit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx

from oppo_contract.spec import HttpReward
from oppo_core.rewards.response_schema import BadReplyError, excerpt, parse_scores
from oppo_core.rng import Use, generator

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 20.0
# These statuses are temporary; any other 4xx is the request's fault and final.
MAY_PASS = {408, 425, 429}
REPLY_BYTES = 16_384
REPLY_BYTES_AN_ANSWER = 256


@dataclass(frozen=True, slots=True)
class Request:
    """Answers in one request. `number` counts a source's requests and seeds the jitter of its pauses."""

    number: int
    sequence_ids: list[int]
    body: bytes


class TryFailedError(Exception):
    """A try without scores. `final`: further tries would fail, too; `pause_s`: requested by the service, seconds."""

    def __init__(self, reason: str, final: bool = False, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.final = final
        self.pause_s = pause_s


class Post:
    """Sends requests. Redirects are not followed: they would bypass the list of allowed hosts."""

    def __init__(self, client: httpx.AsyncClient, url: httpx.URL, token: str | None, http: HttpReward, seed: int) -> None:
        self._client, self._url, self._token, self._http, self._seed = client, url, token, http, seed

    async def scores(self, request: Request, tries: int) -> list[float]:
        """Up to `attempts` tries, of which `tries` were made before.

        Raises:
            TryFailedError: the last try's.
        """
        for attempt in range(1, self._http.attempts + 1):
            try:
                return await self._try(request)
            except TryFailedError as failure:
                if failure.final or attempt == self._http.attempts:
                    raise
                await asyncio.sleep(self.pause_s(request, tries + attempt, failure))
        raise AssertionError("attempts is at least 1")

    def pause_s(self, request: Request, tries: int, failure: TryFailedError) -> float:
        """Seconds before the next try: doubling, times 0.5 to 1.5 drawn from (seed, request, tries), within limits."""
        drawn = float(generator(self._seed, Use.RETRIES, (request.number << 16) + tries).random())
        pause = FIRST_PAUSE_S * 2 ** min(tries - 1, 16) * (0.5 + drawn)
        return float(min(max(pause, failure.pause_s), LONGEST_PAUSE_S))

    async def _try(self, request: Request) -> list[float]:
        headers = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        try:
            # httpx limits each wait on the socket, which a service that sends a byte now and then would never exceed.
            async with (
                asyncio.timeout(self._http.timeout_s),
                self._client.stream("POST", self._url, content=request.body, headers=headers) as response,
            ):
                body, whole = await _read(response, REPLY_BYTES + REPLY_BYTES_AN_ANSWER * len(request.sequence_ids))
        except TimeoutError:
            raise TryFailedError(f"no reply within {self._http.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise TryFailedError(f"{type(error).__name__}: {error}") from None
        return self._scores_of(response, body, whole, len(request.sequence_ids))

    def _scores_of(self, response: httpx.Response, body: bytes, whole: bool, count: int) -> list[float]:
        status = response.status_code
        reason = f"HTTP {status}, it answered {excerpt(body, self._token)}"
        if response.is_redirect:
            raise TryFailedError(f"{reason}; redirects are not followed: name the address itself", final=True)
        if not response.is_success:
            raise TryFailedError(reason, final=status < 500 and status not in MAY_PASS, pause_s=_retry_after(response))
        if not whole:
            raise TryFailedError(f"{reason}; the reply has more than {len(body)} bytes")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise TryFailedError(f"{reason}; the reply is compressed, though that was not offered")
        try:
            return parse_scores(body, count)
        except BadReplyError as error:
            raise TryFailedError(f"{reason}; {error}") from None


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
    asked = response.headers.get("retry-after", "")
    return float(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 0.0
