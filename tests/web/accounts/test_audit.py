"""The audit log: complete, in the deed's transaction, unchangeable, and for owners."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.db import DatabaseError, connection, transaction
from django.test import Client

from oppo_platform.accounts import audit
from oppo_platform.accounts.api_tokens import create_api_token
from oppo_platform.accounts.invites import create_invite
from oppo_platform.accounts.models import AuditEntry, Membership, User
from oppo_platform.accounts.passwords import create_password_link, set_password_by_link
from oppo_platform.accounts.services import create_login_link
from oppo_platform.accounts.teams import AccountError, leave_team, set_member
from oppo_platform.cluster.models import Node, Pool

ROOT = Path(__file__).parents[3]


def log(**wanted):
    """(actor, action, target) of every entry, oldest first; of teams unless asked otherwise."""
    found = AuditEntry.objects.filter(**wanted or {"team__isnull": False})
    return list(found.order_by("id").values_list("actor", "action", "target"))


def test_deeds_leave_rows_with_actor_target_time_and_address(world):
    client = world.login("ada")
    client.post(f"/teams/{world.team.pk}/members", {"user": "ben", "role": "maintainer"}, REMOTE_ADDR="192.0.2.7")
    entry = AuditEntry.objects.get(team=world.team)
    assert (entry.actor, entry.action, entry.target) == ("user:ada", "member.role", "user:ben")
    assert (entry.details, entry.address, entry.at) == ({"old": "member", "new": "maintainer"}, "192.0.2.7", world.clock.now())
    run = world.submit("ben")
    client.post(f"/api/v1/runs/{run.pk}/cancel")
    assert log(action__startswith="run.") == [
        ("user:ben", "run.submit", f"run {run.pk} demo"),
        ("user:ada", "run.cancelled", f"run {run.pk} demo"),
    ]


def test_lists_in_details_are_written_as_text(world):
    details = {"scopes": ["read", "submit"], "from": "<b>"}
    record = {"team": world.team, "action": "token.create", "target": "notebook", "details": details}
    AuditEntry.objects.create(actor="user:ada", at=world.clock.now(), **record)
    page = world.login("ada").get(f"/teams/{world.team.pk}/audit").content.decode()
    assert "scopes read, submit</span>" in page
    assert "from &lt;b&gt;</span>" in page


@pytest.mark.parametrize(("behind_proxy", "address"), [(True, "198.51.100.4"), (False, "127.0.0.1")])
def test_the_address_is_the_proxys_word_only_where_a_proxy_is_trusted(world, settings, behind_proxy, address):
    settings.OPPO_BEHIND_PROXY = behind_proxy
    forwarded = {"X-Forwarded-For": "203.0.113.9, 198.51.100.4"}
    world.login("ada").post(f"/teams/{world.team.pk}/projects", {"name": "Poems"}, headers=forwarded)
    assert AuditEntry.objects.get(team=world.team).address == address


def test_people_coming_and_going_are_recorded(world):
    ada = world.people["ada"]
    token = create_password_link(ada, world.people["ben"]).rpartition("/")[2]
    set_password_by_link(token, "a rather long password")
    Client().get(create_login_link(ada).removeprefix("http://127.0.0.1:8000"))
    Client().post("/accounts/login/", {"login": "ada", "password": "long enough 4 tests"})
    create_api_token(ada, world.team, "notebook")
    leave_team(world.people["vic"], world.team)
    assert [action for _, action, _ in log()] == [
        "password.link",
        "password.reset",
        "login.link",
        "login.password",
        "token.create",
        "member.leave",
    ]


def test_a_changed_password_is_recorded(world):
    client = world.login("ada")
    form = {"oldpassword": "long enough 4 tests", "password1": "a rather long password", "password2": "a rather long password"}
    client.post("/accounts/password/change/", form)
    assert log() == [("user:ada", "password.change", "user:ada")]


def test_an_entry_shares_the_fate_of_its_deed(world):
    with pytest.raises(AccountError):
        set_member(world.people["ada"], world.team, "ada", "viewer")

    def deed_that_fails():
        with transaction.atomic():
            create_invite(world.people["ada"], world.team, "member")
            raise KeyError

    with pytest.raises(KeyError):
        deed_that_fails()
    assert log() == []
    with pytest.raises(RuntimeError, match="outside the transaction"):
        audit.record(world.team.pk, "shell", "team.create", "Letters")


def test_the_database_refuses_to_change_history(world):
    create_invite(world.people["ada"], world.team, "member")
    entry = AuditEntry.objects.get(team=world.team)
    for change in (
        lambda: AuditEntry.objects.update(actor="user:eve"),
        lambda: AuditEntry.objects.all().delete(),
        lambda: connection.cursor().execute("DELETE FROM accounts_auditentry"),
        lambda: world.team.delete(),
    ):
        with pytest.raises((DatabaseError, Exception), match=r"append-only|protected"):
            change()
    entry.refresh_from_db()
    assert entry.actor == "user:ada"


def test_tokens_are_not_in_the_log(world):
    link = create_invite(world.people["ada"], world.team, "member")
    reset = create_password_link(world.people["ada"], world.people["ben"])
    told = str(list(AuditEntry.objects.values()))
    assert link.rpartition("_")[2] not in told
    assert reset.rpartition("_")[2] not in told


def test_owners_filter_and_page(world):
    client, path = world.login("ada"), f"/teams/{world.team.pk}/audit"
    assert "No entries yet" in client.get(path).content.decode()
    with transaction.atomic():
        for number in range(60):
            audit.record(world.team.pk, world.people["ben" if number % 2 else "ada"], "project.create", f"project {number}")
    first = client.get(path).content.decode()
    assert "project 59" in first
    assert "project 9<" not in first
    older = re.search(r'href="(\?before=\d+)"', first)[1]
    assert "project 9<" in client.get(path + older).content.decode()
    bens = client.get(path + "?actor=user:ben&action=project.create").content.decode()
    assert "project 59" in bens
    assert "project 58" not in bens
    assert "No matching entries" in client.get(path + "?action=x").content.decode()
    assert client.get(path + "?before=x").status_code == 404


def test_cluster_audit_log_is_for_administrators(world):
    world.worker()
    client = world.login("ada")
    assert client.get("/sharing/audit").status_code == 403
    User.objects.filter(username="ada").update(is_staff=True)
    client.post(f"/sharing/nodes/{Node.objects.get().pk}/drain", {"reason": "new driver"})
    client.post(f"/sharing/pools/{Pool.objects.get().pk}/teams/{world.team.pk}", {"nominal": "3", "weight": "2"})
    assert log(team=None)[-2:] == [("node:node1", "node.join", "node1"), ("user:ada", "node.drain", "node1")]
    assert [action for _, action, _ in log(team=world.team)] == ["quota.set", "quota.weight"]
    page = client.get("/sharing/audit").content.decode()
    assert "new driver" in page
    assert "quota.set" not in page


def test_entries_of_other_teams_and_foreign_text_stay_out(world):
    Membership.objects.create(team=world.other_team, user=world.people["ada"], role="owner")
    with transaction.atomic():
        audit.record(world.team.pk, "user:<b>x", "project.create", "<script>", name="<i>")
    with transaction.atomic():
        audit.record(world.team.pk, "user:ada", "webhook.add", "hook", conditions=["failed", "stalled"])
    own, other = (world.login("ada").get(f"/teams/{team.pk}/audit").content.decode() for team in (world.team, world.other_team))
    assert "conditions failed, stalled" in own, "a list is text"
    assert "&lt;script&gt;" in own
    assert "<i>" not in own
    assert "&lt;script&gt;" not in other


RECORDED = re.compile(r'audit\.record(?:_for_person)?\(.*?"([a-z]+\.[a-z_]+)"', re.DOTALL)


def test_every_kind_of_entry_is_documented():
    sources = [path.read_text() for path in (ROOT / "platform/oppo_platform").rglob("*.py")]
    recorded = {kind for text in sources for kind in RECORDED.findall(text)}
    documented = set(re.findall(r"`([a-z]+\.[a-z_]+)`", (ROOT / "docs/teams.md").read_text()))
    assert len(recorded) > 12
    assert recorded <= documented
