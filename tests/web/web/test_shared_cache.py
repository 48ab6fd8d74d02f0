"""The cache that counts throttles: shared by processes, without pickles, and not an outage of its own."""

import json

import pytest
import redis
from allauth.core.internal import ratelimit
from django.conf import settings

from oppo_platform import settings as real
from oppo_platform.web.shared_cache import SharedCache


def cache(url: str) -> SharedCache:
    """The cache of one web process."""
    configured = real.CACHES["default"]
    return SharedCache(url, {**configured, "LOCATION": url})


@pytest.fixture
def pair(redis_url: str) -> tuple[SharedCache, SharedCache]:
    """The caches of two processes."""
    first = cache(redis_url)
    first.clear()
    return first, cache(redis_url)


def test_failed_logins_count_over_processes(pair, rf, monkeypatch) -> None:
    request = rf.post("/accounts/login/")

    def attempt(own: SharedCache) -> bool:
        monkeypatch.setattr(ratelimit, "cache", own)
        limits = {"login_failed": "5/5m/key"}
        return ratelimit.consume(request, app="account", action="login_failed", key="ada", config=limits) is not None

    allowed = [attempt(pair[number % 2]) for number in range(6)]
    assert allowed == [True] * 5 + [False]


def test_values_are_json(pair, redis_url: str) -> None:
    pair[0].set("history", [1.5, 2.5], 60)
    pair[0].set("flag", True, 60)
    assert (pair[1].get("history"), pair[1].get("flag"), pair[1].get("nothing")) == ([1.5, 2.5], True, None)
    server = redis.Redis.from_url(redis_url)
    stored = [json.loads(server.get(key) or b"") for key in server.keys("oppo.cache*")]
    assert sorted(map(str, stored)) == ["True", "[1.5, 2.5]"]
    with pytest.raises(TypeError):
        pair[0].set("object", object(), 60)


def test_without_the_server_each_process_counts_for_itself() -> None:
    away, other = cache("redis://127.0.0.1:9/0"), cache("redis://127.0.0.1:9/0")
    assert away.add("attempts", 1, 60)
    assert away.incr("attempts") == 2
    assert away.get("attempts") == 2
    away.delete("attempts")
    assert away.get("attempts", []) == []
    assert other is not away
    assert settings.CACHES["default"]["BACKEND"].endswith("LocMemCache"), "tests of throttles do not meet"
