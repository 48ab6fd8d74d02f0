"""Every listing of the API in pages of one shape: `{"items": […], "next": cursor or null}`, by `limit` and `cursor`.

Lists that grow without end are read from the database page by page. What one person, team or run has of the others is known as a
whole before it is told, and `paged` tells a page of it.
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
    """One page, its items as they are told; `next` is the `cursor` of the following one."""

    items: list[Any]
    next: str | None


def paged(listed: Sequence[T], limit: int, cursor: str, tell: Callable[[T], Any] = lambda item: item, *, key: str = "id") -> Page:
    """The page of a list that begins behind the cursor's place.

    That is behind the item that stood last, wherever it stands by now; when it is gone, where its follower stood.

    Args:
        listed: the whole list in its order, of objects or dictionaries.
        limit, cursor: as they were asked for.
        tell: an item as it is told; called for this page's only.
        key: the name of a number that tells an item from all others.

    Raises:
        BadCursor: it is no `next` of such a list.
    """
    keys = [item[key] if isinstance(item, dict) else getattr(item, key) for item in listed]
    begin = _place(keys, cursor) if cursor else 0
    end = begin + limit
    items = [tell(item) for item in listed[begin:end]]
    return Page(items=items, next=write_cursor(end, keys[end - 1]) if end < len(keys) else None)


def _place(keys: list[int], cursor: str) -> int:
    behind, last = read_cursor(cursor, int, int)
    return keys.index(last) + 1 if last in keys else max(0, behind - 1)
