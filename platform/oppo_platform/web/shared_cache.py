"""Django's cache in Valkey, so that throttles of logins and password resets count over all web processes.

While Valkey does not respond, each process counts in its own memory: throttles are weaker then, and nobody is locked out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import redis
import structlog
from django.core.cache.backends.locmem import LocMemCache
from django.core.cache.backends.redis import RedisCache

log = structlog.get_logger(__name__)


class JsonSerializer:
    """Values as JSON: Django's own serializer unpickles what the server sends."""

    def dumps(self, value: object) -> int | bytes:
        """An integer as it is, for INCR; anything else as JSON."""
        return value if type(value) is int else json.dumps(value).encode()

    def loads(self, data: bytes) -> Any:
        """The value."""
        return json.loads(data)


def _or_own_memory(name: str) -> Callable[..., Any]:
    def call(cache: SharedCache, *arguments: Any, **options: Any) -> Any:
        try:
            return getattr(super(SharedCache, cache), name)(*arguments, **options)
        except redis.RedisError as error:
            log.warning("cache_away", error=str(error))
            return getattr(cache.own, name)(*arguments, **options)

    return call


class SharedCache(RedisCache):
    """`RedisCache` with the process's own memory while the server is away."""

    def __init__(self, server: str, params: dict[str, Any]) -> None:
        super().__init__(server, params)
        self.own = LocMemCache(server, params)

    add = _or_own_memory("add")
    get = _or_own_memory("get")
    set = _or_own_memory("set")
    touch = _or_own_memory("touch")
    delete = _or_own_memory("delete")
    incr = _or_own_memory("incr")
    has_key = _or_own_memory("has_key")
    get_many = _or_own_memory("get_many")
    set_many = _or_own_memory("set_many")
    delete_many = _or_own_memory("delete_many")
    clear = _or_own_memory("clear")
