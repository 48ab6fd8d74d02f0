"""Pagination of every listing: `{"items": […], "next": cursor or null}`, by `limit` and `cursor`.

Unbounded lists are read from the database page by page. Short lists are read as a whole and cut by `paged`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypedDict, TypeVar

from ninja import Query

from oppo_platform.cursors import read_cursor, write_cursor

T = TypeVar("T")

MOST = 200
Limit = Annotated[int, Query(ge=1, le=MOST, description="The most items on a page.")]
Cursor = Annotated[str, Query(max_length=500, description="`next` of the page before; without it the first page.")]


class Page(TypedDict):
    """One page of items; `next` is the `cursor` of the following one."""

    items: list[Any]
    next: str | None


def paged(
    listed: Sequence[T], limit: int, cursor: str, convert: Callable[[T], Any] = lambda item: item, *, key: str = "id"
) -> Page:
    """The page of a list after the cursor's position.

    The position is after the previous page's last item, wherever it is now; if it is gone, at its successor's.

    Args:
        listed: the whole list in its order, of objects or dictionaries.
        limit, cursor: the request's.
        tell: converts an item of this page.
        key: name of the items' unique number.

    Raises:
        BadCursor: it is no `next` of such a list.
    """
    keys = [item[key] if isinstance(item, dict) else getattr(item, key) for item in listed]
    begin = _place(keys, cursor) if cursor else 0
    end = begin + limit
    items = [convert(item) for item in listed[begin:end]]
    return Page(items=items, next=write_cursor(end, keys[end - 1]) if end < len(keys) else None)


def _place(keys: list[int], cursor: str) -> int:
    behind, last = read_cursor(cursor, int, int)
    return keys.index(last) + 1 if last in keys else max(0, behind - 1)
