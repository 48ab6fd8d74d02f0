"""Authentication: a person by session or API token, a worker by one of its three tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.db import connection
from django.http import HttpRequest
from ninja.security import HttpBearer
from ninja.security import SessionAuth as CookieAuth

from oppo_platform.accounts.access import require_scope
from oppo_platform.accounts.api_tokens import user_for_token
from oppo_platform.accounts.models import Scope, User
from oppo_platform.api.rate_limit import count_request
from oppo_platform.cluster.models import Node
from oppo_platform.cluster.services import is_join_token, node_by_token
from oppo_platform.runs.access import visible_runs
from oppo_platform.runs.models import Attempt, Launch
from oppo_platform.tokens import parse_token, same_digest

SAFE = ("GET", "HEAD", "OPTIONS")


class ApiToken(HttpBearer):
    """A person's or a service's token; its user sees the token's team only, and may do what its scope allows.

    `only_reads`: the operation changes nothing, whatever its method.
    """

    def __init__(self, only_reads: bool = False) -> None:
        super().__init__()
        self.only_reads = only_reads

    def authenticate(self, request: HttpRequest, token: str) -> User | None:
        """The user, or None. Raises `PermissionDenied` for a write with a read-only token, `TooMany` above its rate."""
        user = user_for_token(token)
        if user is None or user.bound_token_id is None:
            return None
        request.allowance = count_request(user.bound_token_id)
        if request.method not in SAFE and not self.only_reads:
            require_scope(user, Scope.SUBMIT)
        return user


class SessionAuth(CookieAuth):
    """A logged-in person. A Bearer token takes precedence, and fails the request if it is invalid."""

    def __call__(self, request: HttpRequest) -> User | None:
        """The user, or None, which becomes a 401; only a session's writes need a CSRF token."""
        if sends_token(request) or not request.user.is_authenticated:
            return None
        user: User | None = super().__call__(request)
        return user


class JoinTokenAuth(HttpBearer):
    """A worker that joins."""

    def authenticate(self, request: HttpRequest, token: str) -> bool | None:
        """True, or None."""
        return is_join_token(token) or None


class NodeAuth(HttpBearer):
    """A node's agent."""

    def authenticate(self, request: HttpRequest, token: str) -> Node | None:
        """The node, or None."""
        return node_by_token(token)


@dataclass(frozen=True, slots=True)
class Supervisor:
    """A supervisor of an attempt: on its first node with rank 0, on a further one with its launch's rank."""

    attempt_id: int
    rank: int
    node: Node


class AttemptAuth(HttpBearer):
    """An attempt's supervisor. The operation itself checks whether the attempt is current."""

    def authenticate(self, request: HttpRequest, token: str) -> Supervisor | None:
        """The supervisor, or None."""
        parsed = parse_token(token, "attempt")
        if parsed is None:
            return None
        prefix, secret = parsed
        head = Attempt.objects.select_related("node").filter(token_prefix=prefix).first()
        if head is not None:
            return Supervisor(head.pk, 0, head.node) if same_digest(head.token_digest, secret) else None
        launch = Launch.objects.select_related("node").filter(token_prefix=prefix).first()
        if launch is None or not same_digest(launch.token_digest, secret):
            return None
        return Supervisor(launch.attempt_id, launch.rank, launch.node)


# ninja serves the API's descriptions without an authenticator: they stay behind the login.
NINJAS_OWN = ("openapi-json", "openapi-view", "api-root")
# A cookie needs a CSRF token for writes (ninja checks that), a Bearer token does not.
PERSON: list[Any] = [ApiToken(), SessionAuth()]
READER: list[Any] = [ApiToken(only_reads=True), SessionAuth()]


def sends_token(request: HttpRequest) -> bool:
    """Whether the request authenticates by a Bearer token; other schemes in this header are for a proxy in front of us."""
    return request.headers.get("Authorization", "").partition(" ")[0].lower() == "bearer"


def request_user(request: HttpRequest) -> User | None:
    """The user of a request outside ninja: by Bearer token if there is one, otherwise by session."""
    if sends_token(request):
        return user_for_token(request.headers["Authorization"].partition(" ")[2].strip())
    return request.user if request.user.is_authenticated else None


def exempt_from_login(urls: Any) -> Any:
    """An API's URLs, exempt from the login redirect: every operation has its own authenticator and answers 401 without."""
    for pattern in urls[0]:
        if pattern.name not in NINJAS_OWN:
            pattern.callback.login_required = False
    return urls


def may_see(request: HttpRequest, run_ids: Collection[int]) -> bool | None:
    """Whether the user may see all of these runs now; None if not logged in any more."""
    try:
        user = _still_there(request)
        if user is None:
            return None
        return visible_runs(user).filter(pk__in=run_ids).count() == len(set(run_ids))
    finally:
        connection.close()


def _still_there(request: HttpRequest) -> User | None:
    user: Any = request_user(request)
    if user is None or sends_token(request):
        return user
    if not request.session.exists(request.session.session_key):
        return None
    return User.objects.filter(pk=user.pk, is_active=True).first()
