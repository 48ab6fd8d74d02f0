"""Rate limit per token and minute, and its headers in every response.

    RateLimit-Limit: 600        in each minute
    RateLimit-Remaining: 597    of this minute
    RateLimit-Reset: 41         seconds until the next one

Counted in Valkey, for all web processes together. If Valkey is down, requests are not limited: the limit protects against runaway
loops and must not cause an outage itself. Sessions are not limited.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

import redis
import structlog
from django.conf import settings

WINDOW_S = 60
ANSWERS_WITHIN_S = 0.25

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Allowance:
    """A token's requests in the current minute."""

    limit: int
    remaining: int
    reset_s: int

    def headers(self) -> dict[str, str]:
        """The response's headers."""
        values = {"Limit": self.limit, "Remaining": max(0, self.remaining), "Reset": self.reset_s}
        return {f"RateLimit-{name}": str(value) for name, value in values.items()}


class TooMany(Exception):
    """The token has reached its limit for this minute."""

    def __init__(self, allowance: Allowance) -> None:
        super().__init__(
            f"This token has reached its limit of {allowance.limit:,} requests per minute. Try again in {allowance.reset_s} s;"
            " ask for several runs or metrics in one request, or listen to the stream instead of polling."
        )
        self.allowance = allowance


def count_request(token_id: int) -> Allowance | None:
    """Count one request of a token. None without a limit. Raises `TooMany`."""
    limit = settings.OPPO_API_RATE
    if limit <= 0:
        return None
    now = time.time()  # the web machine's own minute; nothing is stored
    window = int(now // WINDOW_S)
    try:
        used = _count(f"oppo.rate.{token_id}.{window}")
    except redis.RedisError as error:
        log.warning("requests are not counted", error=str(error))
        return None
    allowance = Allowance(limit, limit - used, int((window + 1) * WINDOW_S - now) + 1)
    if used > limit:
        raise TooMany(allowance)
    return allowance


def _count(key: str) -> int:
    valkey = _valkey(settings.REDIS_URL)
    used = int(valkey.incr(key))
    if used == 1:
        valkey.expire(key, 2 * WINDOW_S)
    return used


@lru_cache(maxsize=2)
def _valkey(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=ANSWERS_WITHIN_S, socket_connect_timeout=ANSWERS_WITHIN_S)
