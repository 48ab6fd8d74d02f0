"""Allowed network addresses of webhooks, against server-side request forgery (SSRF). Pure functions.

Users choose webhook URLs, and the platform posts to them from inside the operator's network. An address must therefore be public,
or its host allowed by the operator. Link-local addresses, where clouds serve credentials, are never allowed.
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
    """The parsed URL of a webhook. `path` includes the query."""

    host: str
    port: int
    path: str
    encrypted: bool


class UrlNotAllowed(ValueError):
    """A webhook may not post to this URL; the message is the reason, a sentence."""


def parse_target(url: str, plain_hosts: Collection[str]) -> Target:
    """The parts of a webhook's URL.

    Args:
        plain_hosts: hosts allowed without TLS.

    Raises:
        UrlNotAllowed: it is malformed, not https, or contains a user name or a fragment.
    """
    if len(url) > LONGEST_URL or any(ord(c) <= 32 or ord(c) > 126 for c in url):
        raise UrlNotAllowed(f"A webhook URL must have at most {LONGEST_URL:,} ASCII characters and no spaces.")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UrlNotAllowed("This is not a URL. Example: https://example.org/hooks/oppo.") from None
    if not host or parts.scheme not in ("https", "http"):
        raise UrlNotAllowed("A webhook URL must start with https:// and contain a host.")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise UrlNotAllowed("A webhook URL must not contain a user name, password or fragment; messages are signed instead.")
    encrypted = parts.scheme == "https"
    if not encrypted and host not in plain_hosts:
        raise UrlNotAllowed("Webhook URLs must use https.")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(host, port if port is not None else (443 if encrypted else 80), path, encrypted)


def address_error(address: str, *, private_allowed: bool) -> str:
    """Reason to block a network address; empty if it is allowed.

    Args:
        address: from the resolver or the connection, possibly with an IPv6 zone.
        private_allowed: the operator allows private addresses for the host.
    """
    ip = _embedded_ipv4(ipaddress.ip_address(address.partition("%")[0]))
    reserved = ip.is_reserved and not ip.is_loopback  # Python calls ::1 reserved
    local = isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local  # fec0::/10, which Python calls global
    if ip.is_link_local or ip.is_multicast or ip.is_unspecified or reserved:
        return f"{ip} is not allowed for webhooks"
    if (local or not ip.is_global) and not private_allowed:
        return f"{ip} is a private address (allow its host in OPPO_WEBHOOK_PRIVATE_HOSTS)"
    return ""


def _embedded_ipv4(ip: Address) -> Address:
    """The IPv4 address embedded in an IPv6 address, or the address itself."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    if ip in NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None) or ip
