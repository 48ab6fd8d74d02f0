"""When a request is sent again, and after how long. Pure: no clock, no network."""

from __future__ import annotations

import email.utils
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

# 429: the minute is used up. 502, 503, 504: a proxy's word, or a platform that starts.
PASSING = frozenset({429, 502, 503, 504})
# 409 passes only when the platform says after how long: an earlier try of the same write is still under way.
PASSING_WITH_A_TIME = frozenset({409})


@dataclass(frozen=True, slots=True)
class Retries:
    """How stubborn the client is.

    Attributes:
        most: repetitions after the first try.
        first_s, longest_s: the pause before the first repetition, which doubles, and the longest one; seconds. Each is drawn
            between half of it and all of it, so that many clients do not come back together.
        longest_asked_s: a `Retry-After` beyond this is not waited for.
        draw: yields numbers in [0, 1).
    """

    most: int = 5
    first_s: float = 0.5
    longest_s: float = 15.0
    longest_asked_s: float = 75.0
    draw: Callable[[], float] = field(default=random.random, repr=False, compare=False)

    def pause_s(self, tries: int) -> float:
        """Seconds to wait after so many failed tries (at least one)."""
        whole = min(self.longest_s, self.first_s * 2.0 ** min(tries - 1, 60))
        return whole * (0.5 + 0.5 * self.draw())

    def pause_after(self, status: int, headers: Mapping[str, str], tries: int) -> float | None:
        """Seconds to wait after a reply, or None when it stands: a success, a refusal for good, or too long a wait."""
        asked = retry_after_s(headers)
        if status not in PASSING and not (status in PASSING_WITH_A_TIME and asked is not None):
            return None
        if asked is None:
            return self.pause_s(tries)
        # Spread a little, upwards only: the platform said not to come before.
        return asked + self.draw() * min(1.0, self.first_s) if asked <= self.longest_asked_s else None


def retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds from a `Retry-After` in either of its forms, at least 0; None when there is none that can be read."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - (now or datetime.now(UTC))).total_seconds())
