"""Retry policy: transient statuses, exponential back-off with jitter, `Retry-After`."""

from __future__ import annotations

import email.utils
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

# 429: rate limit. 502, 503, 504: a proxy's error, or a platform that is starting.
TRANSIENT = frozenset({429, 502, 503, 504})
# 409 is transient only with `Retry-After`: an earlier try of the same write is in progress.
TRANSIENT_WITH_RETRY_AFTER = frozenset({409})


@dataclass(frozen=True, slots=True)
class Retries:
    """Number of retries and their delays.

    Attributes:
        most: retries after the first try.
        first_s, longest_s: delay before the first retry, which doubles, and its maximum, in seconds. Jitter: each delay is drawn
            between half of it and all of it.
        longest_asked_s: maximum `Retry-After` to wait for.
        draw: returns random numbers in [0, 1).
    """

    most: int = 5
    first_s: float = 0.5
    longest_s: float = 15.0
    longest_asked_s: float = 75.0
    draw: Callable[[], float] = field(default=random.random, repr=False, compare=False)

    def pause_s(self, tries: int) -> float:
        """Seconds to wait after `tries` failed tries (at least one)."""
        delay = min(self.longest_s, self.first_s * 2.0 ** min(tries - 1, 60))
        return delay * (0.5 + 0.5 * self.draw())

    def pause_after(self, status: int, headers: Mapping[str, str], tries: int) -> float | None:
        """Seconds to wait before retrying after a reply; None if it is final: success, permanent error, or too long a wait."""
        requested_s = retry_after_s(headers)
        if status not in TRANSIENT and not (status in TRANSIENT_WITH_RETRY_AFTER and requested_s is not None):
            return None
        if requested_s is None:
            return self.pause_s(tries)
        # Jitter upwards only: the platform requested a minimum delay.
        return requested_s + self.draw() * min(1.0, self.first_s) if requested_s <= self.longest_asked_s else None


def retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds from a `Retry-After` header (number or date), at least 0; None if absent or invalid."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - (now or datetime.now(UTC))).total_seconds())
