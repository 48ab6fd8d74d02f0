"""Which network addresses a webhook may reach: pure functions.

A webhook's address is written by a user and posted to from inside our network. So what answers there must be a public address, or
its host must be one that the operator named. Link-local addresses, behind which clouds keep their credentials, are never reached.
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
    """Where a webhook's messages go. `path` includes the query."""

    host: str
    port: int
    path: str
    encrypted: bool


class NotAllowed(ValueError):
    """This address may not be posted to; the message says why, a sentence."""


def parse_target(url: str, plain_hosts: Collection[str]) -> Target:
    """The parts of a webhook's address.

    Args:
        plain_hosts: hosts to which messages may go without TLS.

    Raises:
        NotAllowed: it is malformed, not https, or holds a user name or a fragment.
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
    """Why a network address may not be reached; empty when it may.

    Args:
        address: as the resolver or the connection names it, an IPv6 zone included.
        private_allowed: the operator named the host.
    """
    ip = _plain(ipaddress.ip_address(address.partition("%")[0]))
    reserved = ip.is_reserved and not ip.is_loopback  # as ::1 is, too
    local = isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local  # private before fc00::/7 was, and global to Python
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified or reserved:
        return f"{ip} is not allowed for webhooks"
    if (local or not ip.is_global) and not private_allowed:
        return f"{ip} is a private address (allow its host in OPPO_WEBHOOK_PRIVATE_HOSTS)"
    return ""


def _plain(ip: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, where it stands for one."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    if ip in NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None) or ip
