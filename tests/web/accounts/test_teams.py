"""Teams: what each role may do, and how people come, change and go."""

from __future__ import annotations

import re
from html import unescape
from urllib.parse import urlencode

import pytest
from django.test import Client

from oppo_platform.accounts.access import Action, may_reset_password, permits
from oppo_platform.accounts.api_tokens import create_api_token, create_service_token
from oppo_platform.accounts.invites import create_invite, join_by_invite, register_by_invite
from oppo_platform.accounts.models import ApiToken, AuditEntry, Invite, Membership, PasswordLink, Role, User
from oppo_platform.accounts.passwords import create_password_link, set_password_by_link
from oppo_platform.accounts.services import AccountError
from oppo_platform.accounts.teams import leave_team, remove_member, restore_member, set_member
from oppo_platform.runs.models import Run
from tests.web.matrix.pages import RULES

PASSWORD = "a rather long password"
ROLES = {"eve": None, "vic": "viewer", "ben": "member", "max": "maintainer", "ada": "owner"}
# Every request that a role decides about, with the least role that it takes. A page answers 200, a change 302 or 200.
REQUESTS = {
    "GET /teams/{team}": "viewer",
    "GET /runs/{run}": "viewer",
    "GET /api/v1/runs/{run}": "viewer",
    "POST /teams/{team}/projects name=Poems": "member",
    "POST /api/v1/runs": "member",
    "POST /api/v1/runs/{run}/cancel": "maintainer",
    "POST /teams/{team}/members user=ben&role=viewer": "owner",
    "POST /teams/{team}/members/{ben}/remove": "owner",
    "POST /teams/{team}/members/{ben}/password-link": "owner",
    "POST /teams/{team}/members/{ben}/password-link/revoke": "owner",
    "POST /teams/{team}/invites role=member": "owner",
    "POST /teams/{team}/invites/{invite}/revoke": "owner",
    "GET /teams/{team}/audit": "owner",
    "GET /teams/{team}/alerts": "viewer",
    "GET /teams/{team}/tokens": "viewer",
    "POST /teams/{team}/tokens/new name=t&scope=read&days=7": "viewer",
    "POST /teams/{team}/tokens/new name=t&scope=read&days=7&service=1": "owner",
    "POST /teams/{team}/alerts/mail whose=all&conditions=failed": "viewer",
    f"POST /teams/{{team}}/alerts/rules {urlencode(RULES)}": "owner",
    "POST /teams/{team}/alerts/webhooks url=https://example.org/&conditions=failed": "owner",
}


def rank(role):
    """The role's place; a stranger's is below all."""
    return Role.values.index(role) if role else -1


def link_in(reply):
    """The path of the link that a page shows once."""
    shown = re.search(r'id="fresh-link" readonly value="http://127.0.0.1:8000([^"]+)"', reply.content.decode())
    return unescape(shown[1])


MEMBERS = {Action.READ, Action.SUBMIT, Action.DOWNLOAD, Action.CREATE_PROJECT, Action.NAME_SECRETS}
GRANTED = {
    None: set(),
    "viewer": {Action.READ},
    "member": MEMBERS,
    "maintainer": MEMBERS | {Action.STEER_ANY_RUN},
    "owner": set(Action),
}


@pytest.mark.parametrize("role", GRANTED)
def test_actions_are_denied_by_default(role):
    assert {action for action in Action if permits(role, action)} == GRANTED[role]


@pytest.mark.parametrize("request_line", REQUESTS)
def test_roles_and_requests(world, make_spec, request_line):
    world.worker()
    create_invite(world.people["ada"], world.team, "member")
    create_password_link(world.people["ada"], world.people["ben"])
    ids = {"team": world.team.pk, "run": world.submit().pk, "ben": world.people["ben"].pk, "invite": Invite.objects.get().pk}
    line = request_line.format(**ids)
    body = {"spec": make_spec(), "project": world.project.pk} if line == "POST /api/v1/runs" else None
    for who, role in ROLES.items():  # the least first: who is refused changes nothing for the next
        status = answered(world.login(who), line, body)
        if rank(role) >= rank(REQUESTS[request_line]):
            assert status in (200, 201, 302, 422), who  # 422: the one before has made it
        else:
            assert status == (403 if role else 404), who


def answered(client, line, body):
    """The status of one request: `POST path a=1&b=2`, or with a JSON body."""
    method, path, *form = line.split()
    if body is not None:
        return client.post(path, body, content_type="application/json").status_code
    if method == "GET":
        return client.get(path).status_code
    return client.post(path, dict(pair.split("=") for pair in form[0].split("&")) if form else {}).status_code


def test_members_steer_their_own_runs_only(world):
    own, others = world.submit("ben"), world.submit("ada")
    client = world.login("ben")
    assert client.post(f"/api/v1/runs/{own.pk}/cancel").status_code == 200
    assert client.post(f"/api/v1/runs/{others.pk}/cancel").status_code == 403
    set_member(world.people["ada"], world.team, "ben", "viewer")
    mine = world.submit("ben")
    assert client.post(f"/api/v1/runs/{mine.pk}/cancel").status_code == 403


def test_a_token_for_one_team_manages_no_other(world):
    world.people["ada"].bound_team_id = world.other_team.pk
    with pytest.raises(Exception, match="An owner may manage members"):
        set_member(world.people["ada"], world.team, "eve", "member")


def test_the_last_owner_stays(world):
    ada, max_ = world.people["ada"], world.people["max"]
    for attempt in (
        lambda: leave_team(ada, world.team),
        lambda: set_member(ada, world.team, "ada", "member"),
        lambda: remove_member(ada, world.team, ada.pk),
    ):
        with pytest.raises(AccountError, match="last owner"):
            attempt()
    set_member(ada, world.team, "max", "owner")
    leave_team(ada, world.team)
    assert world.login("ada").get(f"/teams/{world.team.pk}").status_code == 404
    with pytest.raises(AccountError, match="last owner"):
        leave_team(max_, world.team)


def test_of_two_owners_who_leave_at_once_one_stays(world, at_once):
    ada, max_ = world.people["ada"], world.people["max"]
    set_member(ada, world.team, "max", "owner")
    results = at_once(lambda: leave_team(ada, world.team), lambda: leave_team(max_, world.team))
    assert sorted(type(result).__name__ for result in results) == ["AccountError", "NoneType"]
    assert Membership.objects.filter(team=world.team, role="owner").count() == 1


def test_removed_member_loses_tokens_but_not_runs(world):
    run = world.submit("ben")
    create_api_token(world.people["ben"], world.team, "notebook")
    world.login("ada").post(f"/teams/{world.team.pk}/members/{world.people['ben'].pk}/remove")
    assert ApiToken.objects.get().revoked_at is not None
    assert Run.objects.get().state == "queued"
    assert world.login("ben").get(f"/runs/{run.pk}").status_code == 404
    assert world.login("ada").post(f"/teams/{world.team.pk}/members/{world.people['eve'].pk}/remove").status_code == 404


def test_the_button_undo_restores_a_removed_member_with_their_role(world):
    ada, ben, path = world.login("ada"), world.people["ben"], f"/teams/{world.team.pk}/members"
    set_member(world.people["ada"], world.team, "ben", "maintainer")
    create_api_token(ben, world.team, "notebook")
    joined = Membership.objects.get(team=world.team, user=ben).joined_at
    world.clock.advance(3600)
    page = ada.post(f"{path}/{ben.pk}/remove", follow=True).content.decode()
    assert f'action="{path}/{ben.pk}/restore"' in page
    page = ada.post(f"{path}/{ben.pk}/restore", follow=True).content.decode()
    assert f"ben is maintainer in {world.team.name} again. Tokens that ben had for it stay revoked." in page
    member = Membership.objects.get(team=world.team, user=ben)
    assert (member.role, member.joined_at) == ("maintainer", joined)
    assert AuditEntry.objects.latest("id").action == "member.restore"
    assert ApiToken.objects.get().revoked_at is not None


def test_of_two_restores_of_a_member_at_once_one_does(world, at_once):
    ada, ben = world.people["ada"], world.people["ben"]
    remove_member(ada, world.team, ben.pk)
    results = at_once(*[lambda: restore_member(ada, world.team, ben.pk)] * 2)
    assert sorted(type(result).__name__ for result in results) == ["AccountError", "Membership"]
    assert AuditEntry.objects.filter(action="member.restore").count() == 1


def test_only_members_that_were_removed_are_restored(world):
    ada, path, people = world.login("ada"), f"/teams/{world.team.pk}/members", world.people
    set_member(people["eve"], world.other_team, "max", "viewer")
    remove_member(people["eve"], world.other_team, people["max"].pk)
    leave_team(people["max"], world.team)  # was removed from the other team only
    service = create_service_token(people["ada"], world.team, "nightly", None, "submit").token.user
    for stranger in (people["max"].pk, people["eve"].pk, service.pk, 10**9):
        assert ada.post(f"{path}/{stranger}/restore").status_code == 404
    remove_member(people["ada"], world.team, people["ben"].pk)
    set_member(people["ada"], world.team, "ben", "viewer")  # in the meantime, with another role
    page = ada.post(f"{path}/{people['ben'].pk}/restore", follow=True).content.decode()
    assert f"ben is a member of {world.team.name} already." in page
    assert Membership.objects.get(team=world.team, user=people["ben"]).role == "viewer"


def test_an_invite_lets_one_new_person_in(world):
    reply = world.login("ada").post(f"/teams/{world.team.pk}/invites", {"role": "maintainer", "note": "zoe@example.org"})
    path, client = link_in(reply), Client()
    page = client.get(path).content.decode()
    assert 'value="zoe@example.org"' in page
    assert client.post(path, {"username": "zoe", "email": "zoe@example.org", "password": "short"}).status_code == 422
    joined = client.post(path, {"username": "zoe", "email": "zoe@example.org", "password": PASSWORD})
    assert joined.headers["Location"] == f"/teams/{world.team.pk}"
    assert client.get(f"/teams/{world.team.pk}").status_code == 200
    assert Membership.objects.get(user__username="zoe").role == "maintainer"
    assert Client().get(path).status_code == 404
    assert Client().post(path, {"username": "yan", "email": "y@example.org", "password": PASSWORD}).status_code == 404
    assert not User.objects.filter(username="yan").exists()


@pytest.mark.parametrize(
    ("form", "given", "kept"),
    [
        ("invites", {"role": "emperor", "note": "zoe@example.org"}, 'name="note" value="zoe@example.org"'),
        ("members", {"user": "zoee", "role": "viewer"}, 'name="user" value="zoee"'),
        ("projects", {"name": "Letters" + "!" * 200}, 'name="name" value="Letters!!!'),
        ("secrets/set", {"name": "HUB TOKEN", "value": "hf_0123456789"}, 'name="name" value="HUB TOKEN"'),
    ],
)
def test_a_form_that_is_refused_keeps_what_was_typed(world, form, given, kept):
    reply = world.login("ada").post(f"/teams/{world.team.pk}/{form}", given)
    page = reply.content.decode()
    assert (reply.status_code, kept in page, "hf_0123456789" in page) == (422, True, False)
    assert not Invite.objects.exists()


def test_the_form_for_new_members_stays_empty_when_a_members_role_is_refused(world):
    reply = world.login("ada").post(f"/teams/{world.team.pk}/members", {"user": "ada", "role": "member"})
    assert (reply.status_code, 'id="new-member" name="user" value=""' in reply.content.decode()) == (422, True)


def test_an_invite_is_joined_with_an_account_that_one_has(world):
    path = create_invite(world.people["ada"], world.team, "viewer").removeprefix("http://127.0.0.1:8000")
    assert b"ada is in" not in world.login("ada").get(path).content
    assert world.login("ada").post(path).status_code == 422  # already in it: the invite is not used up
    assert world.login("eve").post(path).status_code == 302
    assert Membership.objects.get(team=world.team, user=world.people["eve"]).role == "viewer"


@pytest.mark.parametrize("void", ["expired", "revoked", "maker left", "altered", "nonsense"])
def test_void_invites(world, void):
    ada = world.people["ada"]
    link = create_invite(ada, world.team, "owner").removeprefix("http://127.0.0.1:8000")
    if void == "expired":
        world.clock.advance(7 * 86_400 + 1)
    elif void == "revoked":
        world.login("ada").post(f"/teams/{world.team.pk}/invites/{Invite.objects.get().pk}/revoke")
    elif void == "maker left":
        set_member(ada, world.team, "max", "owner")
        set_member(world.people["max"], world.team, "ada", "maintainer")
    elif void == "altered":
        link = link[:-1] + ("0" if link[-1] != "0" else "1")
    else:
        link = "/invites/nonsense"
    assert world.login("eve").get(link).status_code == 404
    assert world.login("eve").post(link).status_code == 404
    assert not Membership.objects.filter(team=world.team, user=world.people["eve"]).exists()


def test_of_two_who_open_an_invite_at_once_one_joins(world, at_once):
    token = create_invite(world.people["ada"], world.team, "member").rpartition("/")[2]
    results = at_once(
        lambda: join_by_invite(token, world.people["eve"]),
        lambda: register_by_invite(token, "zoe", "zoe@example.org", PASSWORD),
    )
    assert sum(isinstance(result, AccountError) for result in results) == 1
    assert Membership.objects.filter(team=world.team, user__username__in=("eve", "zoe")).count() == 1


def test_a_password_link_sets_a_password_once_and_ends_sessions(world):
    ben, owner = world.login("ben"), world.login("ada")
    path = link_in(owner.post(f"/teams/{world.team.pk}/members/{world.people['ben'].pk}/password-link"))
    client = Client()
    assert client.get(path).status_code == 200
    assert client.post(path, {"password": PASSWORD, "again": "another one"}).status_code == 422
    assert client.post(path, {"password": "short", "again": "short"}).status_code == 422
    assert client.post(path, {"password": PASSWORD, "again": PASSWORD}).headers["Location"] == "/runs"
    assert client.get("/runs").status_code == 200
    assert ben.get("/runs").status_code == 302  # logged out
    assert client.post(path, {"password": PASSWORD, "again": PASSWORD}).status_code == 404
    world.people["ben"].refresh_from_db()
    assert world.people["ben"].check_password(PASSWORD)


def test_a_newer_password_link_voids_the_older_and_owners_revoke_them(world):
    ada, ben = world.people["ada"], world.people["ben"]
    first, second = (create_password_link(ada, ben).rpartition("/")[2] for _ in range(2))
    with pytest.raises(AccountError, match="revoked"):
        set_password_by_link(first, PASSWORD)
    assert world.login("ada").post(f"/teams/{world.team.pk}/members/{ben.pk}/password-link/revoke").status_code == 302
    with pytest.raises(AccountError, match="revoked"):
        set_password_by_link(second, PASSWORD)
    third = create_password_link(ada, ben).rpartition("/")[2]
    world.clock.advance(24 * 3600 + 1)
    with pytest.raises(AccountError, match="expired"):
        set_password_by_link(third, PASSWORD)


def test_a_password_link_opens_no_door_to_another_team(world):
    ada, ben = world.people["ada"], world.people["ben"]
    assert may_reset_password(ada, ben)
    Membership.objects.create(team=world.other_team, user=ben, role="viewer")
    assert not may_reset_password(ada, ben)
    assert not may_reset_password(ada, User(is_staff=True))
    reply = world.login("ada").post(f"/teams/{world.team.pk}/members/{ben.pk}/password-link")
    assert reply.status_code == 403
    assert not PasswordLink.objects.exists()


def test_links_are_kept_as_digests_only(world):
    token = create_invite(world.people["ada"], world.team, "member").rpartition("_")[2]
    kept = Invite.objects.values().get()
    assert token not in str(kept)


def test_the_chosen_team_narrows_lists_and_breaks_no_link(world):
    Membership.objects.create(team=world.other_team, user=world.people["ada"], role="viewer")
    run, client = world.submit(name="of our team"), world.login("ada")
    assert run.name in client.get("/runs").content.decode()
    reply = client.post("/teams/current", {"team": world.other_team.pk, "next": "/compare?x=1"})
    assert reply.headers["Location"] == "/compare?x=1"
    assert run.name not in client.get("/runs").content.decode()
    assert run.name not in client.get("/compare").content.decode()
    for link in (f"/runs?project={world.project.pk}", f"/runs/{run.pk}"):
        assert run.name in client.get(link).content.decode()
    assert 'id="submit"' in client.get("/runs/new").content.decode()  # a viewer there: the other team's projects are offered
    assert client.post("/teams/current", {"team": "", "next": "//evil.example"}).headers["Location"] == "/runs"
    assert run.name in client.get("/runs").content.decode()
    for wrong in ("9999", "x"):
        assert client.post("/teams/current", {"team": wrong}).status_code == 404
    client.post("/teams/current", {"team": world.other_team.pk})
    Membership.objects.filter(team=world.other_team, user=world.people["ada"]).delete()
    assert run.name in client.get("/runs").content.decode()


def test_user_of_one_team_is_redirected_to_it(world):
    assert world.login("ada").get("/teams").headers["Location"] == f"/teams/{world.team.pk}"
    Membership.objects.create(team=world.other_team, user=world.people["ada"], role="viewer")
    assert b"Others" in world.login("ada").get("/teams").content
    Membership.objects.all().delete()
    assert b"You are not in a team" in world.login("ada").get("/teams").content


def test_without_mail_the_login_page_says_whom_to_ask(world, settings, mailoutbox):
    settings.EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
    assert b"Ask an owner of your team" in Client().get("/accounts/password/reset/").content
    world.login("ada").post(f"/teams/{world.team.pk}/invites", {"role": "member", "note": "zoe@example.org"})
    assert mailoutbox == []
    settings.OPPO_SMTP_URL = "smtp://mail.example.org"
    reply = world.login("ada").post(f"/teams/{world.team.pk}/invites", {"role": "member", "note": "zoe@example.org"})
    assert mailoutbox[0].to == ["zoe@example.org"]
    assert link_in(reply) in mailoutbox[0].body
    assert b"Send reset link" in Client().get("/accounts/password/reset/").content
