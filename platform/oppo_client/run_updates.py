"""Following runs until they end: by the live stream (SSE), or by polling while the stream is unavailable."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from oppo_client.errors import OppoError, ServerFault, TooManyRequests, Unreachable, WaitTimeout
from oppo_client.messages import Reply, get, parse_json
from oppo_client.run_base import ENDED
from oppo_client.transport import Session
from oppo_client.validation import RUN

POLL_INTERVAL_S = 2.0
# Polls between two attempts to open the stream; grows fourfold up to this.
MAX_POLLS = 256
# The stream may be silent for 15 s, during which a timeout is not checked; with less time left than this the client polls.
STREAM_MIN_LEFT_S = 20.0
# Covers a restart of the platform; runs continue meanwhile.
MAX_OUTAGE_S = 900.0
STREAM_REPLY = Reply(200, {}, url="The live stream")
TRANSIENT = (Unreachable, ServerFault, TooManyRequests)


def iter_updates(
    session: Session, run_ids: Sequence[int], *, timeout_s: float | None = None, max_outage_s: float = MAX_OUTAGE_S
) -> Iterator[dict[str, Any]]:
    """Summaries of runs: each at once, then after every change, until all have ended.

    Raises:
        WaitTimeout: after `timeout_s`. Unreachable, ServerFault, TooManyRequests: after `max_outage_s` of nothing else.
    """
    progress = _Progress(run_ids, timeout_s, max_outage_s)
    yield from _poll(session, progress, 1)
    polls = 1
    with closing(session.events()) as stream:
        while progress.pending:
            if progress.left_s > STREAM_MIN_LEFT_S:
                try:
                    event = stream.next(get("stream", runs=progress.pending, cursor=progress.cursor))
                except TRANSIENT as error:
                    progress.on_error(error)
                else:
                    progress.on_contact()  # pings and the stream's end count: a run may be quiet longer than `max_outage_s`
                    if event is None:
                        session.sleep(session.retries.pause_s(1))
                    elif event.kind == "run":
                        polls = 1
                        yield from progress.accept(parse_json(STREAM_REPLY, event.data, RUN))
                    continue
            session.sleep(min(POLL_INTERVAL_S, progress.left_s))
            yield from _poll(session, progress, polls)
            polls = min(MAX_POLLS, 4 * polls)


def _poll(session: Session, progress: _Progress, times: int) -> Iterator[dict[str, Any]]:
    """Fetch every pending run `times` times."""
    for turn in range(times):
        if turn:
            session.sleep(min(POLL_INTERVAL_S, progress.left_s))
        for run_id in progress.pending:
            try:
                summary = session.json(get(f"runs/{run_id}"), RUN)
            except TRANSIENT as error:
                progress.on_error(error)
                session.sleep(min(progress.left_s, POLL_INTERVAL_S))
            else:
                progress.on_contact()
                yield from progress.accept(summary)
        progress.check_timeout()


class _Progress:
    """Runs that have not ended, the newest cursor of each, and both deadlines."""

    def __init__(self, run_ids: Sequence[int], timeout_s: float | None, max_outage_s: float) -> None:
        self.pending = [int(run_id) for run_id in dict.fromkeys(run_ids)]
        self._cursors: dict[int, int] = {}
        self._timeout_s, self._max_outage_s = timeout_s, max_outage_s
        self._started_at = self._contact_at = time.monotonic()

    @property
    def cursor(self) -> str | None:
        """Cursor parameter that resumes the stream."""
        known = [f"{run_id}:{self._cursors[run_id]}" for run_id in self.pending if run_id in self._cursors]
        return ",".join(known) or None

    @property
    def left_s(self) -> float:
        """Seconds until the timeout; infinity without one."""
        return math.inf if self._timeout_s is None else max(0.0, self._started_at + self._timeout_s - time.monotonic())

    def check_timeout(self) -> None:
        """Raise `WaitTimeout` if the timeout is over and a run has not ended."""
        if self.pending and self.left_s <= 0:
            runs = ", ".join(map(str, self.pending))
            raise WaitTimeout(f"Run {runs} has not ended within {self._timeout_s:g} s; it continues.")

    def on_contact(self) -> None:
        """Record that the platform replied."""
        self._contact_at = time.monotonic()

    def on_error(self, error: OppoError) -> None:
        """Raise the error if the platform has not replied for `max_outage_s`."""
        if time.monotonic() - self._contact_at > self._max_outage_s:
            raise error

    def accept(self, summary: dict[str, Any]) -> list[dict[str, Any]]:
        """`[summary]`, or an empty list if it is not newer than the last one."""
        run_id, cursor = int(summary["id"]), int(summary["cursor"])
        if cursor <= self._cursors.get(run_id, -1) or run_id not in self.pending:
            return []
        self._cursors[run_id] = cursor
        if summary["state"] in ENDED:
            self.pending = [other for other in self.pending if other != run_id]
        return [summary]
