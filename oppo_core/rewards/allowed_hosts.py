"""Hosts that an engine may contact: the operator's allow-list in its environment.

Any user may submit a spec, and a request from inside a network reaches internal services. So no host is allowed unless the
environment of the engine's process names it.
"""

from __future__ import annotations

from collections.abc import Mapping

import httpx

PORTS = {"http": 80, "https": 443}


def host_port(url: httpx.URL) -> str:
    """host:port, in the format of the lists of allowed hosts."""
    return f"{url.host}:{url.port or PORTS[url.scheme]}"


def parse_allowed_hosts(variable: str, environment: Mapping[str, str]) -> set[str]:
    """host:port of every entry of `variable`, separated by commas or spaces; an entry without a port allows 80 and 443.

    Raises:
        ValueError: an entry is neither a host nor host:port.
    """
    hosts = set()
    for entry in environment.get(variable, "").replace(",", " ").split():
        try:
            url = httpx.URL(f"http://{entry}")
        except httpx.InvalidURL:
            url = None
        if url is None or not url.host or "/" in entry or url.userinfo:
            raise ValueError(f"{variable} has an entry that is not host or host:port: {entry!r}")
        # httpx omits :80, http's default.
        ports = [url.port] if url.port else [80] if entry.endswith(":80") else list(PORTS.values())
        hosts |= {f"{url.host}:{port}" for port in ports}
    return hosts
