"""A reward service over HTTP: requests are sent when answers finish, while other scorers work (docs/rewards.md).

An event loop in a thread sends requests; the scorers' thread submits them, and waits for scores only when it needs them. Every
wait is bounded: attempts have a time limit, and a circuit breaker ends the run after repeated failures.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from itertools import count

import httpx

from oppo_contract.spec import HttpReward
from oppo_core.rewards.allowed_hosts import host_port
from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.http_request import AttemptError, Request, RewardClient
from oppo_core.rewards.prompt_records import PromptRecords
from oppo_core.rewards.protocol import Answer
from oppo_core.rewards.service_auth import allowed_url, bearer_token

WIRE_VERSION = 1
OPENED_WITHIN_S = 60.0
CLOSED_WITHIN_S = 5.0


class ServiceReward:
    """A `FinishedReward` that queries a service. The content of a request depends on chunk and sequence_id, never on timing."""

    is_remote = True

    def __init__(self, http: HttpReward, seed: int, records: PromptRecords | None) -> None:
        """`records`: only for `send_line`.

        Raises:
            RewardError: the host is not allowed, or the token is missing.
        """
        self._http, self._seed, self._records = http, seed, records
        self._url, self._token = allowed_url(http.url), bearer_token(http)
        self._host_port = host_port(self._url)
        self._numbers = count(1)
        self._changed = threading.Condition()
        self._scores: dict[int, float] = {}
        self._pending: dict[int, Request] = {}
        self._failure: RewardError | None = None
        self._failed_in_a_row = 0
        self._opened = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run_loop()), name="reward-service", daemon=True)
        self._thread.start()
        if not self._opened.wait(OPENED_WITHIN_S):
            raise RewardError("the reward service's thread did not start; its traceback is in the log")

    def start(self, answers: list[Answer], alive: Callable[[], None]) -> None:
        """Submit answers; returns at once. Raises RewardError if the service has failed since."""
        self._raise_failure()
        for request in self._requests(answers):
            with self._changed:
                self._pending |= dict.fromkeys(request.sequence_ids, request)
            asyncio.run_coroutine_threadsafe(self._send(request), self._loop)

    def wait(self, sequence_ids: list[int], timeout_s: float) -> bool:
        with self._changed:
            answered = self._changed.wait_for(lambda: self._failure is not None or self._has(sequence_ids), timeout_s)
        self._raise_failure()
        if not answered and not self._thread.is_alive():
            raise RewardError(f"the thread of the reward service {self._host_port} has ended; its traceback is in the log")
        return answered

    def score(self, sequence_id: int) -> float:
        return self._scores[sequence_id]

    def forget(self, sequence_id: int) -> None:
        """Drop an answer; a response in flight is ignored."""
        with self._changed:
            self._scores.pop(sequence_id, None)
            self._pending.pop(sequence_id, None)

    def close(self) -> None:
        """Cancel requests in flight, and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(CLOSED_WITHIN_S)

    def _has(self, sequence_ids: list[int]) -> bool:
        return all(i in self._scores for i in sequence_ids)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _requests(self, answers: list[Answer]) -> Iterator[Request]:
        size = self._http.answers_a_request
        for first in range(0, len(answers), size):
            batch = answers[first : first + size]
            body = {"version": WIRE_VERSION, "answers": [self._answer_json(answer) for answer in batch]}
            yield Request(next(self._numbers), [answer.sequence_id for answer in batch], json.dumps(body).encode())

    def _answer_json(self, answer: Answer) -> dict[str, object]:
        fields: dict[str, object] = {
            "id": str(answer.sequence_id),
            "prompt": answer.prompt,
            "response": answer.response,
            "ended": answer.ended,
        }
        if answer.messages is not None:
            fields["messages"] = answer.messages
        return fields if self._records is None else fields | {"line": self._records.record(answer.prompt_ids)}

    async def _run_loop(self) -> None:
        """Body of the thread, which owns the client until `close`."""
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._slots = asyncio.Semaphore(self._http.requests_at_once)
        # Ignore the environment's proxies: a proxy would be a host outside the allow-list.
        async with httpx.AsyncClient(
            timeout=self._http.timeout_s, follow_redirects=False, trust_env=False, verify=ssl.create_default_context(),
            limits=httpx.Limits(max_connections=self._http.requests_at_once),
        ) as client:  # fmt: skip
            self._client = RewardClient(client, self._url, self._token, self._http, self._seed)
            self._opened.set()
            await self._end.wait()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _send(self, request: Request) -> None:
        async with self._slots:
            try:
                await self._retry_until_scored(request)
            except Exception as error:  # noqa: BLE001 - `wait` reports every error
                self._fail(f"{type(error).__name__}: {error}")

    async def _retry_until_scored(self, request: Request) -> None:
        """Retry until there are scores, they are no longer needed, or the circuit breaker opens.

        The breaker counts requests; one failure of a request is `attempts` failed attempts.
        """
        attempts = 0
        while self._failure is None and self._is_pending(request):
            try:
                self._deliver(request, await self._client.attempt(request))
                return
            except AttemptError as error:
                attempts += 1
                if error.final:
                    self._fail(str(error))
                    return
                if attempts % self._http.attempts == 0:
                    self._count_failure(attempts // self._http.attempts, error)
                await asyncio.sleep(self._client.pause_s(request, attempts, error) if self._failure is None else 0.0)

    def _count_failure(self, failures: int, error: AttemptError) -> None:
        """Open the breaker after `break_after` failures in a row, of one request or of all."""
        self._failed_in_a_row += 1
        in_a_row = max(failures, self._failed_in_a_row)
        if in_a_row >= self._http.break_after:
            self._fail(f"{in_a_row} requests in a row failed, {self._http.attempts} attempts each; the last: {error}")

    def _is_pending(self, request: Request) -> bool:
        with self._changed:
            return any(self._pending.get(i) is request for i in request.sequence_ids)

    def _deliver(self, request: Request, scores: list[float]) -> None:
        self._failed_in_a_row = 0
        with self._changed:
            for sequence_id, score in zip(request.sequence_ids, scores, strict=True):
                if self._pending.get(sequence_id) is request:
                    del self._pending[sequence_id]
                    self._scores[sequence_id] = score
            self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or RewardError(f"the reward service {self._host_port} failed: {reason}")
            self._changed.notify_all()
