"""HTTP POST to a webhook URL, protected against server-side request forgery (SSRF).

Guarantees: the name is resolved once and the connection uses the address that was checked, with the name's certificate; the peer
address is checked again; redirects and proxies are not used; the request ends within its time limit, also with a slow receiver
(the resolver has its own limit); of the response only the head is read and only the status used.

Posts are signed by the convention of standardwebhooks.com: `v1,` and base64 of HMAC-SHA256 over `id.timestamp.body`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from django.conf import settings

from oppo_platform.alerts.url_policy import Target, UrlNotAllowed, address_error, parse_target

PREFIX = "whsec_"
SECRET_BYTES = 32


class PostError(Exception):
    """There was no response; the message is the reason, a sentence."""


def post(url: str, body: bytes, headers: Mapping[str, str], within_s: float) -> int:
    """Post within `within_s` seconds in total, and return the HTTP status.

    Raises:
        UrlNotAllowed: the URL or its address is not allowed. PostError: no HTTP response in time.
    """
    target = parse_target(url, settings.OPPO_WEBHOOK_PLAIN_HOSTS)
    connection = _CheckedConnection(target, time.monotonic() + within_s)
    timer = threading.Timer(within_s, connection.abort)
    timer.daemon = True
    timer.start()
    try:
        connection.request("POST", target.path, body=body, headers={"User-Agent": "OPPO-Platform", **headers})
        status = connection.getresponse().status
        if connection.aborted:  # while reading the head
            raise TimeoutError
    except (OSError, http.client.HTTPException) as error:
        if connection.aborted or isinstance(error, TimeoutError):
            raise PostError(f"{target.host} did not respond within {within_s:g} s.") from error
        raise PostError(f"{target.host}: {_error_text(error)}") from error
    finally:
        timer.cancel()
        connection.close()
    return status


def _error_text(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}."
    return f"{type(error).__name__}: {str(error).strip() or 'the connection broke'}"[:300]


class _CheckedConnection(http.client.HTTPConnection):
    """A connection to a checked address, with a deadline."""

    def __init__(self, target: Target, deadline: float) -> None:
        super().__init__(target.host, target.port)
        self.default_port = 443 if target.encrypted else 80  # for the Host header
        self._target, self._deadline = target, deadline
        self._raw: socket.socket | None = None
        self.aborted = False

    def connect(self) -> None:
        """Resolve, check, connect to the checked address, check the peer, and start TLS."""
        family, address = _resolve(self._target)
        self._raw = socket.socket(family, socket.SOCK_STREAM)
        self._raw.settimeout(self._left_s())
        self._raw.connect(address)
        _check(self._target.host, str(self._raw.getpeername()[0]))
        self._raw.settimeout(self._left_s())
        self.sock = self._raw
        if self._target.encrypted:
            context = ssl.create_default_context()
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            # In two steps: `abort` needs the socket during the handshake.
            self.sock = context.wrap_socket(self._raw, server_hostname=self._target.host, do_handshake_on_connect=False)
            self.sock.do_handshake()

    def abort(self) -> None:
        """Shut down from another thread: pending reads and writes end at once."""
        self.aborted = True
        if (used := self.sock or self._raw) is not None:
            with suppress(OSError):  # it has ended meanwhile
                used.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Also close the socket of a connection that was not established."""
        super().close()
        if self._raw is not None:
            self._raw.close()

    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _resolve(target: Target) -> tuple[socket.AddressFamily, Any]:
    """The first address of the host. All of its addresses must be allowed, so that a name cannot also point inside."""
    try:
        addresses = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise PostError(f"Host not found: {target.host}.") from None
    for _, _, _, _, address in addresses:
        _check(target.host, str(address[0]))
    family, _, _, _, address = addresses[0]
    return family, address


def check_host(host: str) -> None:
    """Refuse a webhook's host that is itself an inner address. Names are resolved and checked at each delivery.

    Raises:
        UrlNotAllowed: it is an address that webhooks may not reach, or this machine's own name.
    """
    name = host.rstrip(".").lower()
    address = "127.0.0.1" if name == "localhost" or name.endswith(".localhost") else name
    try:
        if ":" not in address:
            address = socket.inet_ntoa(socket.inet_aton(address))  # also `127.1` and `0x7f000001`, as resolvers read them
    except OSError:  # a name
        return
    _check(host, address)


def _check(host: str, address: str) -> None:
    if why := address_error(address, private_allowed=host in settings.OPPO_WEBHOOK_PRIVATE_HOSTS):
        raise UrlNotAllowed(f"{host} is not allowed: {why}.")


def new_secret() -> str:
    """A new signing secret: `whsec_` and base64."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signed_headers(secret: str, message_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """The headers of one try.

    Args:
        secret: from `new_secret`.
        message_id: the same in every try.
        at: time of this try; receivers reject old timestamps.
    """
    timestamp = str(int(at.timestamp()))
    key = base64.b64decode(secret.removeprefix(PREFIX))
    digest = hmac.new(key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "Content-Type": "application/json",
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
