"""Every list of the API has the same pages: `items` and `next`, a `limit` up to 200, and a `cursor`."""

from urllib.parse import parse_qsl

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from oppo_platform.accounts.access import visible_teams
from oppo_platform.accounts.models import Membership, Role, Team
from oppo_platform.api.paging import MOST, paged
from oppo_platform.cursors import BadCursor
from oppo_platform.projects.models import Project
from oppo_platform.runs.models import Run
from oppo_platform.storage.models import FolderDeletion, RunStorage, TeamStorage
from oppo_platform.storage.selectors import team_taken, teams_taken
from tests.web.matrix.operations import OPERATIONS


def listings(document):
    """Operation id → description of each that answers with items."""
    schemas = document["components"]["schemas"]
    for operation in (told for path in document["paths"].values() for told in path.values()):
        reply = next(iter(operation["responses"].values())).get("content", {}).get("application/json", {}).get("schema", {})
        if "items" in schemas.get(reply.get("$ref", "").rpartition("/")[2], {}).get("properties", {}):
            yield operation


def test_every_list_can_be_walked(world, scene):
    """One item a page yields what one page of all of them does; nothing else is taken for a limit or a cursor."""
    client = world.login("ada")
    found = list(listings(client.get("/api/v1/openapi.json").json()))
    assert len(found) > 15
    for operation in found:
        name = operation["operationId"]
        limit = next(each["schema"] for each in operation["parameters"] if each["name"] == "limit")
        assert (limit["minimum"], limit["maximum"]) == (1, MOST), name
        path, _, query = OPERATIONS[name].path.format(**scene).partition("?")
        needs = {each["name"] for each in operation["parameters"] if each["in"] == "query" and each.get("required")}
        path, given = f"/api/v1/{path}", {key: value for key, value in parse_qsl(query) if key in needs}
        whole = client.get(path, {**given, "limit": MOST}).json()
        assert whole["next"] is None, name
        assert walked(client, path, given) == whole["items"], name
        for wrong in ({"limit": 0}, {"limit": MOST + 1}, {"cursor": "x"}, {"cursor": "WzFd"[:3]}):
            assert client.get(path, {**given, **wrong}).status_code == 422, (name, wrong)


def walked(client, path, given):
    items, cursor = [], ""
    while cursor is not None:
        page = client.get(path, {**given, "limit": 1, **({"cursor": cursor} if cursor else {})}).json()
        assert len(page["items"]) <= 1
        items += page["items"]
        cursor = page["next"]
    return items


def test_a_page_begins_behind_the_last_item_wherever_that_is():
    rows = [{"id": n} for n in (7, 3, 9, 4, 1)]
    first = paged(rows, 2, "")
    assert [row["id"] for row in first["items"]] == [7, 3]
    assert paged(rows, 2, first["next"])["items"] == rows[2:4]
    assert paged([{"id": 8}, *rows], 2, first["next"])["items"] == rows[2:4], "something came before"
    assert paged([row for row in rows if row["id"] != 3], 2, first["next"])["items"] == rows[2:4], "the last one is gone"
    assert paged(rows[:2], 2, first["next"]) == {"items": [], "next": None}
    with pytest.raises(BadCursor):
        paged(rows, 2, "nonsense")


def teams_with_much(world, count):
    """So many more teams of ada's, each with a project, two runs and two folders that take something."""
    at = world.clock.now()
    for number in range(count):
        team = Team.objects.create(name=f"Team {number:02}", created_at=at)
        Membership.objects.create(team=team, user=world.people["ada"], role=list(Role)[number % 4])
        project = Project.objects.create(team=team, name="main", created_at=at)
        for place in (1, 2):
            run = world.submit()
            Run.objects.filter(pk=run.pk).update(project=project)
            RunStorage.objects.create(run=run, logs=10 * place + number, measured_at=at)
            FolderDeletion.objects.create(team=team, run_number=run.pk, url=f"file:///{run.pk}", bytes=5, asked_at=at)
        TeamStorage.objects.create(team=team, used_bytes=30 + 2 * number, quota_bytes=100)


@pytest.mark.parametrize("path", ["teams", "storage", "me"])
def test_twelve_teams_cost_as_many_queries_as_two(world, path, django_assert_num_queries):
    client = world.login("ada")
    teams_with_much(world, 1)
    with CaptureQueriesContext(connection) as two:
        assert len(listed(client, path)) == 2
    Team.objects.filter(name__startswith="Team").delete()
    teams_with_much(world, 11)
    with django_assert_num_queries(len(two)):
        assert len(listed(client, path)) == 12


def listed(client, path):
    reply = client.get(f"/api/v1/{path}").json()
    return reply["teams"] if path == "me" else reply["items"]


def test_teams_that_are_told_together_are_told_as_each_alone(world):
    teams_with_much(world, 3)
    Membership.objects.filter(team=world.team, user=world.people["ada"]).update(role="viewer")
    told = listed(world.login("ada"), "storage")
    assert told == [team_taken(team) for team in visible_teams(world.people["ada"])]
    assert [(each["used_bytes"], [run["bytes"] for run in each["largest"]]) for each in told] == [
        (0, []), (30, [20, 10]), (32, [21, 11]), (34, [22, 12]),
    ]  # fmt: skip
    assert [len(each["to_delete"]) for each in told] == [0, 2, 2, 2]
    assert [[run["bytes"] for run in each["largest"]] for each in teams_taken(visible_teams(world.people["ada"]), 1)] == [
        [], [20], [21], [22],
    ]  # fmt: skip
    roles = {each["name"]: each["role"] for each in listed(world.login("ada"), "teams")}
    assert roles == {"Letters": "viewer", **{f"Team {n:02}": role for n, role in zip(range(3), Role, strict=False)}}
