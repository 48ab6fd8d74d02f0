"""One POST to a user-supplied URL, with protection against server-side request forgery.

Guarantees: the name is resolved once, the connection goes to the checked address under the name's certificate, and the peer is
checked again; no redirects, no proxies; a total time limit, however slow the receiver (the resolver has its own limit); only the
head of the response is read, and only its status used.

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
from datetime import datetime
from typing import Any

from django.conf import settings

from oppo_platform.alerts.url_policy import NotAllowed, Target, parse_target, refuse

PREFIX = "whsec_"
SECRET_BYTES = 32


class NotPosted(Exception):
    """No response; the message is a sentence."""


def post(url: str, body: bytes, headers: Mapping[str, str], within_s: float) -> int:
    """Post, and return the HTTP status.

    Args:
        within_s: total time limit.

    Raises:
        NotAllowed: the address is not allowed. NotPosted: no response in time, or not HTTP.
    """
    target = parse_target(url, settings.OPPO_WEBHOOK_PLAIN_HOSTS)
    connection = _Checked(target, time.monotonic() + within_s)
    ended = threading.Timer(within_s, connection.cut)
    ended.daemon = True
    ended.start()
    try:
        connection.request("POST", target.path, body=body, headers={"User-Agent": "OPPO-Platform", **headers})
        status = connection.getresponse().status
        if connection.was_cut:  # within the head
            raise TimeoutError
    except (OSError, http.client.HTTPException) as error:
        if connection.was_cut or isinstance(error, TimeoutError):
            raise NotPosted(f"{target.host} did not respond within {within_s:g} s.") from error
        raise NotPosted(f"{target.host}: {_said(error)}") from error
    finally:
        ended.cancel()
        connection.close()
    return status


def _said(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}."
    return f"{type(error).__name__}: {str(error).strip() or 'the connection broke'}"[:300]


class _Checked(http.client.HTTPConnection):
    """A connection to a checked address."""

    def __init__(self, target: Target, deadline: float) -> None:
        super().__init__(target.host, target.port)
        self.default_port = 443 if target.encrypted else 80  # for the Host header
        self._target, self._deadline = target, deadline
        self._raw: socket.socket | None = None
        self.was_cut = False

    def connect(self) -> None:
        """Resolve, check, connect to the checked address, check the peer, and start TLS."""
        family, address = _resolved(self._target)
        self._raw = socket.socket(family, socket.SOCK_STREAM)
        self._raw.settimeout(self._left_s())
        self._raw.connect(address)
        _check(self._target.host, str(self._raw.getpeername()[0]))
        self._raw.settimeout(self._left_s())
        self.sock = self._raw
        if self._target.encrypted:
            context = ssl.create_default_context()
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            # In two steps: `cut` must find the socket during the handshake.
            self.sock = context.wrap_socket(self._raw, server_hostname=self._target.host, do_handshake_on_connect=False)
            self.sock.do_handshake()

    def cut(self) -> None:
        """Shut the socket down from another thread: reads and writes end at once."""
        self.was_cut = True
        held = self.sock or self._raw
        if held is None:
            return
        try:
            held.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has already ended
            return

    def close(self) -> None:
        """Also for a connection without more than a socket."""
        super().close()
        if self._raw is not None:
            self._raw.close()

    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _resolved(target: Target) -> tuple[socket.AddressFamily, Any]:
    """The first address of the host. All its addresses must be allowed: a name that also points inside is an attack."""
    try:
        result = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise NotPosted(f"Host not found: {target.host}.") from None
    for _, _, _, _, address in result:
        _check(target.host, str(address[0]))
    family, _, _, _, address = result[0]
    return family, address


def _check(host: str, address: str) -> None:
    why = refuse(address, private_allowed=host in settings.OPPO_WEBHOOK_PRIVATE_HOSTS)
    if why:
        raise NotAllowed(f"{host} is not allowed: {why}.")


def new_secret() -> str:
    """A secret in the format for its owner: `whsec_` and base64."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signed_headers(secret: str, message_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """Headers of one try.

    Args:
        secret: from `new_secret`.
        message_id: the same in every try.
        at: time of this try; receivers refuse old messages.
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
