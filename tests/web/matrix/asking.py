"""Who asks, what a row lets them hear, and what they hear indeed. Each request is rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from django.db import transaction
from django.test import Client

from oppo_platform.accounts.access import CAP, RANK
from oppo_platform.accounts.api_tokens import create_api_token, create_service_token
from oppo_platform.accounts.models import Membership, Role, Scope, User
from tests.web.matrix.rows import ADMINISTRATOR, ANYBODY, PUBLIC, Row

TEAM = {"vic": Role.VIEWER, "ben": Role.MEMBER, "max": Role.MAINTAINER, "ada": Role.OWNER}
LOGIN = "login"  # the answer that leads to the login page


@dataclass(frozen=True)
class Asker:
    """Somebody with a session, with a token of some scope, with a worker's token, or with nothing (`known` is false for both).

    `role`: in the team whose things the rows are about; None for who is not in it. `elsewhere`: in a team of their own.
    """

    name: str
    role: Role | None = None
    elsewhere: Role | None = None
    scope: Scope | None = None
    administers: bool = False
    known: bool = True
    cookies: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def cap_role(self, role: Role | None) -> int:
        """The rank of a role as far as a token lets one use it; -1 for none."""
        return -1 if role is None else min(RANK[role], RANK[CAP[self.scope]] if self.scope else RANK[Role.OWNER])


def expected(row: Row, asker: Asker, *, page: bool) -> int | str | None:
    """The status, `LOGIN`, or None when anything will do: what is public is for those who are not logged in."""
    if row.least == PUBLIC:
        return None if asker.known else row.status
    if not asker.known or (page and asker.scope):
        return LOGIN if page else 401
    if asker.scope == Scope.READ and row.writes:
        return 403
    if row.least == ANYBODY:
        return row.status
    if row.least == ADMINISTRATOR:
        return row.status if asker.administers else 403
    if row.of_the_team and asker.role is None:
        return 404
    role = asker.role if asker.role is not None else asker.elsewhere
    if asker.cap_role(role) < RANK[Role(row.least)]:
        return 404 if row.hidden else 403
    return 403 if row.admin and asker.scope not in (None, Scope.ADMIN) else row.status


def ask(asker: Asker, row: Row, scene: dict[str, Any], prefix: str = "") -> tuple[int | str, str]:
    """Status, or `LOGIN`, and text of the answer (none of a file or a stream); what the request has done is undone."""
    client = _client()
    client.cookies.clear()
    client.cookies.load(asker.cookies)
    path, body = row.filled(scene)
    kind = {} if row.method == "get" else {"data": body or {}} | ({"content_type": "application/json"} if prefix else {})
    with transaction.atomic():
        reply = getattr(client, row.method)(f"{prefix}{path}", headers=asker.headers, **kind)
        transaction.set_rollback(True)
    text = "" if reply.streaming else reply.content.decode()
    reply.close()
    to_login = reply.status_code == 302 and reply.headers["Location"].startswith("/accounts/login/?next=")
    return LOGIN if to_login else reply.status_code, text


@cache
def _client() -> Client:
    """One for all: every client loads the whole stack of middleware anew."""
    return Client()


def strangers(world: Any, scene: dict[str, Any]) -> list[Asker]:
    """Who is not let in at all: nobody, workers, and tokens that are none."""
    worker = world.worker("node3")
    texts = {"join": world.join_token, "node": worker.token, "attempt": scene["attempt_token"], "made-up": "oppoapi_x_y"}
    return [Asker("nobody", known=False)] + [Asker(name, known=False, headers=_bearer(text)) for name, text in texts.items()]


def people(world: Any) -> list[Asker]:
    """With a session: every role of the team, the owner of another one, and an administrator of the cluster."""
    root = world.people["root"] = User.objects.create_user("root", "root@example.org", "long enough 4 tests", is_staff=True)
    Membership.objects.create(team=world.other_team, user=root, role=Role.VIEWER)
    return [
        *(Asker(name, role, cookies=_session(world, name)) for name, role in TEAM.items()),
        Asker("eve", elsewhere=Role.OWNER, cookies=_session(world, "eve")),
        Asker("root", elsewhere=Role.VIEWER, administers=True, cookies=_session(world, "root")),
    ]


def programs(world: Any) -> Iterator[Asker]:
    """With a token of every scope: every role of the team, the owner of another one; and services of the team."""
    for scope in Scope:
        for name, role in TEAM.items():
            text = _token_of_before(world, name, scope)
            yield Asker(f"{name}, {scope}", role, scope=scope, headers=_bearer(text))
        text = create_api_token(world.people["eve"], world.other_team, "hers", scope=scope).text
        yield Asker(f"eve, {scope}", elsewhere=Role.OWNER, scope=scope, headers=_bearer(text))
    for scope, role in ((Scope.READ, Role.VIEWER), (Scope.SUBMIT, Role.MEMBER)):
        text = create_service_token(world.people["ada"], world.team, f"service to {scope}", None, scope).text
        yield Asker(f"service, {scope}", role, scope=scope, headers=_bearer(text))


def _token_of_before(world: Any, name: str, scope: Scope) -> str:
    """A token that its person made when they were an owner: what they may now decides."""
    theirs = Membership.objects.filter(user=world.people[name], team=world.team)
    role = theirs.get().role
    theirs.update(role=Role.OWNER)
    text = create_api_token(world.people[name], world.team, "one", scope=scope).text
    theirs.update(role=role)
    return text


def _session(world: Any, name: str) -> dict[str, str]:
    return {key: morsel.value for key, morsel in world.login(name).cookies.items()}


def _bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}
