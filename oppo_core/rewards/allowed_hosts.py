"""Which hosts an engine may talk to at a spec's word: the operator's list in its environment.

A spec comes from anybody who may submit, and a request from inside a network reaches what is not meant for everybody. So
nothing is allowed unless the environment of the engine's process names it.
"""

from __future__ import annotations

from collections.abc import Mapping

import httpx

PORTS = {"http": 80, "https": 443}


def place_of(url: httpx.URL) -> str:
    """host:port, as the lists of allowed hosts have it."""
    return f"{url.host}:{url.port or PORTS[url.scheme]}"


def allowed_places(variable: str, environment: Mapping[str, str]) -> set[str]:
    """host:port of every entry of `variable`, separated by commas or spaces; an entry without a port allows 80 and 443.

    Raises:
        ValueError: an entry is neither a host nor host:port.
    """
    places = set()
    for entry in environment.get(variable, "").replace(",", " ").split():
        try:
            url = httpx.URL(f"http://{entry}")
        except httpx.InvalidURL:
            url = None
        if url is None or not url.host or "/" in entry or url.userinfo:
            raise ValueError(f"{variable} has an entry that is no host or host:port: {entry!r}")
        # httpx reads :80 as no port, since it is http's own.
        ports = [url.port] if url.port else [80] if entry.endswith(":80") else list(PORTS.values())
        places |= {f"{url.host}:{port}" for port in ports}
    return places
