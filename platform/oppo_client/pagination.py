"""What goes on page by page or event by event, written once for both clients (`flow`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from oppo_client.errors import OppoError, ServerFault, TooManyRequests, Unreachable, WaitTimeout
from oppo_client.records import LogLine, log_line
from oppo_client.retry import Retries
from oppo_client.sans_io import Batch, Feed, Flow, Listen, Pause, Reply, asked, get, told
from oppo_client.validation import LOGS, RUN, Shape, page_of

T = TypeVar("T")

ENDED = frozenset({"succeeded", "failed", "cancelled"})
PAGE = 200
LINES_A_CALL = 1000
# The platform answers as soon as there are lines, and after so long without any.
LINES_WITHIN_S = 25
# A run that writes all the time costs two calls a second of the ten that a token has.
LINES_GATHER_S = 0.5
POLLS_EVERY_S = 2.0
MOST_POLLS = 256
# With less time left than this there is no stream: it may be silent for 15 s, and nobody would look at the clock.
STREAM_LEFT_S = 20.0
# A platform that is restarted or moved is back by then; runs go on meanwhile.
BACK_WITHIN_S = 900.0
STREAM = Reply(200, {}, url="The live stream")
PASSING = (Unreachable, ServerFault, TooManyRequests)


def pages(path: str, params: Mapping[str, Any], shape: Shape, read: Callable[[Any], T], retries: Retries) -> Feed[T]:
    """Every item of a listing, page by page; `shape`: an item's."""
    params = {"limit": PAGE, **params}
    while True:
        page = yield from asked(get(path, **params), retries, page_of(shape))
        yield Batch([read(item) for item in page["items"]])
        if page["next"] is None:
            return
        params = {**params, "cursor": page["next"]}


def log_lines(run_id: int, tail: int | None, follow: bool, wanted: Mapping[str, Any], retries: Retries) -> Feed[LogLine]:
    """The last `tail` lines (None: all), oldest first; then, with `follow`, those that come, until the run has ended."""
    path = f"runs/{int(run_id)}/logs"
    newest, last = yield from _tail(path, tail, wanted, retries)
    yield Batch(newest)
    while follow:
        news = yield from asked(get(path, **wanted, after=last, limit=LINES_A_CALL, wait=LINES_WITHIN_S), retries, LOGS)
        yield Batch([log_line(line) for line in news["lines"]])
        last = news["next"]
        if len(news["lines"]) == LINES_A_CALL:
            continue
        if news["ended"]:
            return
        yield Pause(LINES_GATHER_S)


def _tail(path: str, tail: int | None, wanted: Mapping[str, Any], retries: Retries) -> Flow[tuple[list[LogLine], int]]:
    """The last lines, oldest first, and the id of the last one (0 when there is none). Read backwards."""
    parts: list[list[Any]] = []
    found, before = 0, None
    while tail is None or found < tail or not parts:
        limit = LINES_A_CALL if tail is None else max(1, min(LINES_A_CALL, tail - found))
        page = yield from asked(get(path, **wanted, before=before, limit=limit), retries, LOGS)
        parts.append(page["lines"])
        found += len(page["lines"])
        if not page["earlier"] or not page["lines"]:
            break
        before = page["lines"][0]["id"]
    lines = [log_line(line) for part in reversed(parts) for line in part]
    return (lines[-tail:] if tail else lines if tail is None else []), (lines[-1].id if lines else 0)


def changes(
    run_ids: Sequence[int], retries: Retries, *, within_s: float | None = None, back_within_s: float = BACK_WITHIN_S
) -> Feed[dict[str, Any]]:
    """Summaries of runs, each at once and then whenever it moves on, until all have ended.

    By the live stream; while it cannot be had, by asking every two seconds, and trying the stream again ever more seldom.

    Raises:
        WaitTimeout: `within_s` are over. Unreachable, ServerFault, TooManyRequests: nothing else for `back_within_s`.
    """
    watch = _Watch(run_ids, within_s, back_within_s)
    yield from _polled(watch, 1, retries)
    polls = 1
    while watch.pending:
        if watch.left_s > STREAM_LEFT_S:
            try:
                event = yield Listen(get("stream", runs=watch.pending, cursor=watch.cursor))
            except PASSING as error:
                watch.nothing(error)
            else:
                watch.heard()  # its signs of life too, and that it ended: a run may be quiet for longer than a restart may take
                if event is None:
                    yield Pause(retries.pause_s(1))
                elif event.kind == "run":
                    polls = 1
                    yield Batch(watch.news(told(STREAM, event.data, RUN)))
                continue
        yield Pause(min(POLLS_EVERY_S, watch.left_s))
        yield from _polled(watch, polls, retries)
        polls = min(MOST_POLLS, 4 * polls)


def _polled(watch: _Watch, times: int, retries: Retries) -> Feed[dict[str, Any]]:
    """Ask for every run so many times."""
    for turn in range(times):
        if turn:
            yield Pause(min(POLLS_EVERY_S, watch.left_s))
        for run_id in watch.pending:
            try:
                summary = yield from asked(get(f"runs/{run_id}"), retries, RUN)
            except PASSING as error:
                watch.nothing(error)
                yield Pause(min(watch.left_s, POLLS_EVERY_S))
            else:
                watch.heard()
                yield Batch(watch.news(summary))
        watch.check()


class _Watch:
    """Which runs have not ended, what was last heard of each, and how long anybody still waits."""

    def __init__(self, run_ids: Sequence[int], within_s: float | None, back_within_s: float) -> None:
        self.pending = [int(run_id) for run_id in dict.fromkeys(run_ids)]
        self._seen: dict[int, int] = {}
        self._within_s, self._back_within_s = within_s, back_within_s
        self._since = self._heard_at = time.monotonic()

    @property
    def cursor(self) -> str | None:
        """Where the stream goes on."""
        known = [f"{run_id}:{self._seen[run_id]}" for run_id in self.pending if run_id in self._seen]
        return ",".join(known) or None

    @property
    def left_s(self) -> float:
        """Seconds until the wait is over; infinity without an end."""
        return math.inf if self._within_s is None else max(0.0, self._since + self._within_s - time.monotonic())

    def check(self) -> None:
        """Raise `WaitTimeout` when the time is up and a run has not ended."""
        if self.pending and self.left_s <= 0:
            named = ", ".join(map(str, self.pending))
            raise WaitTimeout(f"Run {named} has not ended within {self._within_s:g} s; it continues.")

    def heard(self) -> None:
        """The platform has given a sign of life."""
        self._heard_at = time.monotonic()

    def nothing(self, error: OppoError) -> None:
        """It has not. Raises the error when that has been so for too long."""
        if time.monotonic() - self._heard_at > self._back_within_s:
            raise error

    def news(self, summary: dict[str, Any]) -> list[dict[str, Any]]:
        """The summary in a list, or nothing when it was heard before."""
        run_id, cursor = int(summary["id"]), int(summary["cursor"])
        if cursor <= self._seen.get(run_id, -1) or run_id not in self.pending:
            return []
        self._seen[run_id] = cursor
        if summary["state"] in ENDED:
            self.pending = [other for other in self.pending if other != run_id]
        return [summary]
