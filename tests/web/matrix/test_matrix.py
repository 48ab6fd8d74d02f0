"""Deny by default: every address and every operation × every role × own and another's team × every scope of a token.

`operations` and `pages` have a row a request; `asking.expected` says in one place what follows from a row. What has no row fails.
"""

import re

import pytest
from django.test import Client
from django.urls import get_resolver, resolve

from oppo_platform.accounts.models import Scope
from oppo_platform.api.v1 import described
from tests.web.matrix.asking import Asker, ask, expected, people, programs, strangers
from tests.web.matrix.operations import FURTHER, OPERATIONS, OWN_RUN
from tests.web.matrix.pages import ACCOUNTS, PAGES, WORKERS
from tests.web.matrix.rows import ADMINISTRATOR, PUBLIC

API, WORKER_API = "/api/v1/", "/api/worker/v1/"
# What only the team knows; nobody else reads it in any answer.
INSIDE = re.compile("Letters|63 nats|HF_TOKEN|example.org/old")
# The same for everybody, with examples that were recorded in such a team.
DESCRIPTION = ("openapi.json", "/api")
# However they are asked for, the first leads to the runs and the others are not there.
NO_PAGES = ("/", "/api/v1/", "/api/worker/v1/")


def every_request():
    """(prefix, row) of all rows."""
    yield from ((API, row) for row in [*OPERATIONS.values(), *FURTHER])
    yield from (("", row) for row in [*PAGES, *ACCOUNTS])
    yield from ((WORKER_API, row) for rows in WORKERS.values() for row in rows)


def routes(patterns, prefix=""):
    """Every address as it is written in `urls`."""
    for pattern in patterns:
        route = prefix + str(pattern.pattern)
        yield from routes(pattern.url_patterns, route) if hasattr(pattern, "url_patterns") else [route]


def differing(rows, askers, scene, prefix):
    """What was answered otherwise than it should have been, in words, a line each."""
    found = []
    for asker in askers:
        for row in rows:
            wanted = expected(row, asker, page=not prefix)
            status, text = ask(asker, row, scene, prefix)
            words = f"{asker.name}: {row.method} {row.path} {row.body or ''}"
            if wanted is not None and status != wanted:
                found.append(f"{words}: {status} and not {wanted}: {text[:200] if prefix else ''}")
            foreign = asker.role is None and not asker.administers and row.least != PUBLIC and row.path not in DESCRIPTION
            if foreign and (leak := INSIDE.search(text)):
                found.append(f"{words} tells of {leak[0]}")
    return "\n".join(found)


def test_every_operation_has_a_row():
    paths = described()["paths"].values()
    assert {operation["operationId"] for methods in paths for operation in methods.values()} == set(OPERATIONS)


def test_every_address_has_a_row(scene):
    told = {resolve((prefix + row.path).format(**scene).split("?")[0]).route for prefix, row in every_request()}
    assert {route.replace("^", "") for route in routes(get_resolver().url_patterns)} == told


def test_url_without_a_row_is_refused(world, scene):
    """A page takes the methods that it has rows for, and no others."""
    ada, nobody = world.login("ada"), Client()
    rows = [row for row in PAGES if row.least != ADMINISTRATOR]
    taken = {(resolve(path := row.filled(scene)[0].split("?")[0]).route, row.method): path for row in rows}
    for (route, _), path in taken.items():
        for method in {"get", "post", "put", "patch", "delete"}:
            if (route, method) not in taken and path not in NO_PAGES:
                assert ada.generic(method.upper(), path).status_code == 405, (method, path)
                assert nobody.generic(method.upper(), path).headers["Location"].startswith("/accounts/login/?next="), path


@pytest.mark.parametrize("askers", [strangers, people, programs])
def test_operations(world, scene, askers):
    who = askers(world, scene) if askers is strangers else askers(world)
    assert differing([*OPERATIONS.values(), *FURTHER], who, scene, API) == ""


def test_members_steer_their_own_runs(world, scene):
    who = {asker.name: asker for asker in people(world)}
    assert {ask(who["ben"], row, scene, API)[0] for row in OWN_RUN} == {200}
    assert {ask(who["vic"], row, scene, API)[0] for row in OWN_RUN} == {403}
    assert {ask(who["eve"], row, scene, API)[0] for row in OWN_RUN} == {404}


def test_pages(world, scene):
    token = [asker for asker in programs(world) if asker.name == f"ada, {Scope.ADMIN}"]
    assert differing(PAGES + ACCOUNTS, [*strangers(world, scene), *people(world), *token], scene, "") == ""


def test_worker_calls(world, scene):
    """Each by one kind of token; of nodes and attempts by their own."""
    others = {"join": "made-up", "node": world.worker("node4").token, "attempt": scene["other_attempt_token"]}
    own = {"join": world.join_token, "node": scene["node_token"], "attempt": scene["attempt_token"]}
    texts = [own["join"], own["node"], own["attempt"], *others.values()]
    for kind, rows in WORKERS.items():
        for row in rows:
            for text in texts:
                status, told = ask(Asker("", headers={"Authorization": f"Bearer {text}"}), row, scene, WORKER_API)
                if text == own[kind]:
                    assert status == row.status, (row.path, told)
                elif text == others[kind] and "{attempt}" in row.path:
                    assert status in (404, 409), (row.path, told)
                elif text != others[kind] or kind == "join":
                    assert status == 401, (row.path, told)
    for asker in [*people(world), *programs(world)]:
        assert {ask(asker, row, scene, WORKER_API)[0] for rows in WORKERS.values() for row in rows} == {401}, asker.name


def test_cookies_alone_write_nothing(world, scene):
    """Every write by session needs the CSRF token of its page as well."""
    client = world.login("ada", enforce_csrf_checks=True)
    for prefix, row in every_request():
        if row.writes and prefix != WORKER_API:
            path, body = row.filled(scene)
            reply = getattr(client, row.method)(f"{prefix}{path}", body or {}, content_type="application/json")
            assert reply.status_code == 403, path
    assert Client().get("/healthz").status_code == 200
