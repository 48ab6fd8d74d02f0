"""Network addresses that a webhook may use: pure functions.

A user enters the URL and our network sends the request. So the address must be public, or its host one that the operator allowed.
Link-local addresses, where clouds serve credentials, are never allowed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import urlsplit

NAT64 = ipaddress.ip_network("64:ff9b::/96")
LONGEST_URL = 2000
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Target(NamedTuple):
    """Destination of a webhook. `path` includes the query."""

    host: str
    port: int
    path: str
    encrypted: bool


class NotAllowed(ValueError):
    """The address is not allowed; the message is a sentence."""


def parse_target(url: str, plain_hosts: Collection[str]) -> Target:
    """Parse a webhook's URL.

    Args:
        plain_hosts: hosts that may be used without TLS.

    Raises:
        NotAllowed: it is malformed, not https, or has a user name or a fragment.
    """
    if len(url) > LONGEST_URL or any(ord(c) <= 32 or ord(c) > 126 for c in url):
        raise NotAllowed(f"A webhook URL must have at most {LONGEST_URL:,} ASCII characters and no spaces.")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise NotAllowed("This is not a URL. Example: https://example.org/hooks/oppo.") from None
    if not host or parts.scheme not in ("https", "http"):
        raise NotAllowed("A webhook URL must start with https:// and contain a host.")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise NotAllowed("A webhook URL must not contain a user name, password or fragment; messages are signed instead.")
    encrypted = parts.scheme == "https"
    if not encrypted and host not in plain_hosts:
        raise NotAllowed("Webhook URLs must use https.")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(host, port if port is not None else (443 if encrypted else 80), path, encrypted)


def refuse(address: str, *, private_allowed: bool) -> str:
    """Why a network address is not allowed; empty if it is.

    Args:
        address: from the resolver or the connection, with an IPv6 zone if any.
        private_allowed: the operator allowed the host.
    """
    ip = _plain(ipaddress.ip_address(address.partition("%")[0]))
    reserved = ip.is_reserved and not ip.is_loopback  # like ::1
    local = (
        isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local
    )  # the predecessor of fc00::/7, which Python counts as global
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified or reserved:
        return f"{ip} is not allowed for webhooks"
    if (local or not ip.is_global) and not private_allowed:
        return f"{ip} is a private address (allow its host in OPPO_WEBHOOK_PRIVATE_HOSTS)"
    return ""


def _plain(ip: Address) -> Address:
    """The embedded IPv4 address of an IPv6 address, if any."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    if ip in NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None) or ip
