"""Paginated listings and log lines of the API, as iterators that fetch pages on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from oppo_client.messages import get
from oppo_client.records import LogLine, parse_log_line
from oppo_client.transport import Session
from oppo_client.validation import LOGS, Shape, page_of

PAGE = 200
LINES_A_CALL = 1000
# Long poll: the platform replies as soon as there are lines, or after this time without any.
LOG_WAIT_S = 25
# Limits a busy log to two calls a second, of the ten that a token may make.
LOG_PAUSE_S = 0.5


def iter_pages(session: Session, path: str, params: Mapping[str, Any], shape: Shape = dict) -> Iterator[dict[str, Any]]:
    """Every item of a listing. Empty parameters are omitted; `shape` is an item's."""
    params = {"limit": PAGE, **{name: value for name, value in params.items() if value is not None and value != ""}}
    while True:
        page = session.json(get(path, **params), page_of(shape))
        yield from page["items"]
        if page["next"] is None:
            return
        params["cursor"] = page["next"]


def fetch_all(session: Session, path: str, shape: Shape = dict) -> list[dict[str, Any]]:
    """Every item of a listing at once."""
    return list(iter_pages(session, path, {}, shape))


def iter_log(session: Session, run_id: int, tail: int | None, follow: bool, filters: Mapping[str, Any]) -> Iterator[LogLine]:
    """The last `tail` lines (None: all), oldest first; with `follow`, then new lines until the run has ended."""
    path = f"runs/{run_id}/logs"
    lines, last = _fetch_tail(session, path, tail, filters)
    yield from lines
    while follow:
        page = session.json(get(path, **filters, after=last, limit=LINES_A_CALL, wait=LOG_WAIT_S), LOGS)
        yield from map(parse_log_line, page["lines"])
        last = page["next"]
        if len(page["lines"]) == LINES_A_CALL:
            continue
        if page["ended"]:
            return
        session.sleep(LOG_PAUSE_S)


def _fetch_tail(session: Session, path: str, tail: int | None, filters: Mapping[str, Any]) -> tuple[list[LogLine], int]:
    """The last lines, oldest first, and the id of the last one (0 without lines). Reads pages backwards."""
    parts: list[list[Any]] = []
    count, before = 0, None
    while tail is None or count < tail or not parts:
        limit = LINES_A_CALL if tail is None else max(1, min(LINES_A_CALL, tail - count))
        page = session.json(get(path, **filters, before=before, limit=limit), LOGS)
        parts.append(page["lines"])
        count += len(page["lines"])
        if not page["earlier"] or not page["lines"]:
            break
        before = page["lines"][0]["id"]
    lines = [parse_log_line(line) for part in reversed(parts) for line in part]
    return (lines[-tail:] if tail else lines if tail is None else []), (lines[-1].id if lines else 0)
