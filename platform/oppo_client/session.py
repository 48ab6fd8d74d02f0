"""What a run needs of the client that it came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from oppo_client.retry import Retries
from oppo_client.sans_io import Feed, Flow

T = TypeVar("T")


class Session(Protocol):
    """Sends requests to one platform; `Client` is one.

    Attributes:
        url: the platform's address.
        retries: how often, and after how long, a request is sent again.
    """

    url: str
    retries: Retries

    def perform(self, flow: Flow[T]) -> T:
        """Drive a call to its end."""

    def iterate(self, feed: Feed[T]) -> Iterator[T]:
        """Drive a listing; items are fetched as they are asked for."""
