"""API tokens: scopes are lids on roles, services are nobody's, and a void token opens nothing."""

import json
import re
from html import unescape

import pytest
from django.core.exceptions import PermissionDenied
from django.test import Client

from oppo_platform.accounts.api_tokens import MOST_TOKENS, create_api_token, create_service_token, user_for_token
from oppo_platform.accounts.models import ApiToken, AuditEntry, Membership, User
from oppo_platform.accounts.services import AccountError, find_user

# What each scope adds: a request, and the least scope and role that it takes.
REQUESTS = [
    ("get", "me", None, "read", "viewer"),
    ("get", "runs", None, "read", "viewer"),
    ("post", "runs/validate", {"spec": {}}, "read", "viewer"),
    ("post", "runs", "spec", "submit", "member"),
    ("post", "runs/{run}/tags", {"add": ["x"]}, "submit", "member"),
    ("post", "runs/{run}/cancel", None, "submit", "maintainer"),
    ("post", "tokens", {"name": "mine"}, "admin", "viewer"),
    ("post", "tokens", {"name": "job", "service": True}, "admin", "owner"),
]
SCOPES, ROLES = ["read", "submit", "admin"], ["viewer", "member", "maintainer", "owner"]
NAMES = dict(zip(ROLES, ["vic", "ben", "max", "ada"], strict=True))


def bearer(text):
    return Client(headers={"Authorization": f"Bearer {text}"})


def ask(client, method, path, body):
    url = f"/api/v1/{path}"
    return client.get(url) if method == "get" else client.generic(method.upper(), url, body, content_type="application/json")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_is_a_lid_on_the_role(world, make_spec, scope, role):
    world.worker()
    person = world.people[NAMES[role]]
    if role == "viewer" and scope == "submit":
        with pytest.raises(AccountError, match="only have the scope read"):
            create_api_token(person, world.team, "t", scope=scope)
        return
    client = bearer(create_api_token(person, world.team, "t", scope=scope).text)
    for method, path, body, least_scope, least_role in REQUESTS:
        run = world.submit("ada")
        told = {"spec": make_spec()} if body == "spec" else {"scope": "read", **body} if path == "tokens" else body
        reply = ask(client, method, path.format(run=run.pk), json.dumps(told or {}))
        allowed = SCOPES.index(scope) >= SCOPES.index(least_scope) and ROLES.index(role) >= ROLES.index(least_role)
        assert (reply.status_code < 300) == allowed, (path, body, reply.status_code, reply.content)
        assert allowed or reply.status_code == 403
        if not allowed and least_scope == "submit" and scope == "read":
            assert reply.json()["detail"].startswith("This token has the scope read; this request needs submit.")


def test_a_token_says_who_it_is_and_what_it_may(world):
    text = create_api_token(world.people["ada"], world.team, "notebook", days=7, scope="submit").text
    told = bearer(text).get("/api/v1/me").json()
    assert (told["user"], told["email"], told["service"]) == ("ada", "ada@example.org", False)
    assert told["teams"] == [{"id": world.team.pk, "name": "Letters", "role": "maintainer"}]
    assert (told["token"]["name"], told["token"]["scope"]) == ("notebook", "submit")
    assert "token" not in told["token"]
    session = world.login("ada").get("/api/v1/me").json()
    assert (session["teams"][0]["role"], session["token"]) == ("owner", None)


def test_tokens_are_made_listed_and_revoked_over_http(world):
    ada, ben, eve = (world.login(name) for name in ("ada", "ben", "eve"))
    made = ben.post("/api/v1/tokens", {"name": "laptop", "days": 30}, content_type="application/json")
    assert made.status_code == 201
    text, number = made.json()["token"], made.json()["id"]
    assert ApiToken.objects.get().digest not in made.content.decode()
    assert [item["name"] for item in ben.get("/api/v1/tokens").json()["items"]] == ["laptop"]
    assert [item["user"] for item in ada.get("/api/v1/tokens").json()["items"]] == ["ben"], "an owner sees whose there are"
    assert world.login("max").get("/api/v1/tokens").json()["items"] == []
    assert eve.get(f"/api/v1/tokens?team={world.team.pk}").status_code == 404
    for stranger in (eve, world.login("max")):
        assert stranger.delete(f"/api/v1/tokens/{number}").status_code == 404
    assert bearer(text).get("/api/v1/runs").status_code == 200
    assert ada.delete(f"/api/v1/tokens/{number}").status_code == 204
    assert bearer(text).get("/api/v1/runs").status_code == 401
    assert ada.delete(f"/api/v1/tokens/{number}").status_code == 404
    entries = AuditEntry.objects.filter(action__startswith="token.").order_by("id").values_list("action", "actor", "target")
    assert list(entries) == [("token.create", "user:ben", "laptop"), ("token.revoke", "user:ada", "laptop")]


def test_a_token_may_end_itself_whatever_its_scope_but_no_other(world):
    first, second = (create_api_token(world.people["ada"], world.team, name, scope="read") for name in ("one", "two"))
    client = bearer(first.text)
    for made, status in ((second, 403), (first, 403)):
        assert client.delete(f"/api/v1/tokens/{made.token.pk}").status_code == status
    submits = create_api_token(world.people["ada"], world.team, "three", scope="submit")
    assert bearer(submits.text).delete(f"/api/v1/tokens/{first.token.pk}").status_code == 403
    assert bearer(submits.text).delete(f"/api/v1/tokens/{submits.token.pk}").status_code == 204


def test_a_service_has_an_account_that_opens_nothing_else(world, make_spec):
    world.worker()
    made = create_service_token(world.people["ada"], world.team, "Nightly job", None, "submit")
    service, client = made.token.user, bearer(made.text)
    assert (service.username, service.has_usable_password()) == ("nightly-job.service", False)
    assert client.get("/api/v1/me").json()["teams"][0]["role"] == "member"
    assert client.post("/api/v1/runs", {"spec": make_spec()}, content_type="application/json").status_code == 201
    with pytest.raises(AccountError, match="no user named"):
        find_user("nightly-job.service")
    again = create_service_token(world.people["ada"], world.team, "nightly job", None, "read")
    assert again.token.user.username == "nightly-job.service-2"
    page = world.login("ada").get(f"/teams/{world.team.pk}").content.decode()
    assert ".service" not in page
    assert world.login("ada").post(f"/teams/{world.team.pk}/members/{service.pk}/remove").status_code == 404
    world.people["ada"].memberships.all().delete()
    assert client.get("/api/v1/runs").status_code == 200, "it outlives who made it"


def test_a_service_ends_with_its_token(world):
    made = create_service_token(world.people["ada"], world.team, "nightly", 5, "read")
    assert world.login("ada").delete(f"/api/v1/tokens/{made.token.pk}").status_code == 204
    assert user_for_token(made.text) is None
    service = User.objects.get(pk=made.token.user_id)
    assert not service.is_active
    assert not Membership.objects.filter(user=service).exists()


def test_only_owners_make_services_and_never_with_admin(world):
    for name in ("vic", "ben", "max", "eve"):
        with pytest.raises(PermissionDenied):
            create_service_token(world.people[name], world.team, "x", None, "read")
    with pytest.raises(AccountError, match="only have the scope"):
        create_service_token(world.people["ada"], world.team, "x", None, "admin")


@pytest.mark.parametrize(
    ("body", "words"),
    [({"name": ""}, "A token name"), ({"name": "<b>"}, "A token name"), ({"name": "x", "scope": "root"}, "could not be parsed"),
     ({"name": "x", "days": 0}, "could not be parsed"), ({"name": "x", "days": 1e9}, "could not be parsed")],
)  # fmt: skip
def test_invalid_token_requests_are_refused(world, body, words):
    reply = world.login("ada").post("/api/v1/tokens", body, content_type="application/json")
    assert (reply.status_code, words in reply.json()["detail"]) == (422, True)
    assert not ApiToken.objects.exists()


def test_number_of_tokens_is_limited(world):
    for n in range(MOST_TOKENS):
        create_api_token(world.people["ben"], world.team, f"t{n}", days=1)
    with pytest.raises(AccountError, match="Revoke unused"):
        create_api_token(world.people["ben"], world.team, "more")
    world.clock.advance(86_401)
    create_api_token(world.people["ben"], world.team, "more")


def test_the_page_shows_a_token_once(world):
    client, url = world.login("ben"), f"/teams/{world.team.pk}/tokens"
    made = client.post(f"{url}/new", {"name": "laptop", "scope": "submit", "days": "90"})
    text = unescape(re.search(r'readonly value="(oppoapi_[^"]+)"', made.content.decode())[1])
    assert made.headers["Cache-Control"].startswith("max-age=0")
    assert bearer(text).get("/api/v1/me").json()["token"]["name"] == "laptop"
    later = client.get(url).content.decode()
    assert text not in later
    assert "laptop" in later
    assert "Service tokens" not in later
    token = ApiToken.objects.get()
    assert world.login("eve").post(f"{url}/{token.pk}/revoke").status_code == 404
    assert client.post(f"{url}/{token.pk}/revoke").status_code == 302
    assert bearer(text).get("/api/v1/me").status_code == 401
    assert client.post(f"{url}/new", {"name": "job", "scope": "read", "days": "", "service": "1"}).status_code == 403
    owner = world.login("ada").post(f"{url}/new", {"name": "job", "scope": "read", "days": "", "service": "1"})
    assert "as job.service" in " ".join(owner.content.decode().split())


def test_a_token_that_is_refused_leaves_what_was_typed(world):
    ada, url = world.login("ada"), f"/teams/{world.team.pk}/tokens/new"
    for form, more in (("token-name", {}), ("service-name", {"service": "1"})):
        refused = ada.post(url, {"name": "nightly\x07", "scope": "read", "days": "7", **more})
        typed = refused.content.decode().split(f'id="{form}"')[1].split("</form>")[0]
        assert (refused.status_code, 'value="nightly' in typed) == (422, True)
        assert re.findall(r'value="(\w+)" selected', typed) == ["read", "7"]
    assert not ApiToken.objects.exists()


def test_a_new_start_of_the_platform_voids_the_token_of_the_last_one(world):
    from oppo_platform.accounts.api_tokens import revoke_named

    old, other = (create_api_token(world.people["ada"], world.team, name) for name in ("oppo up", "notebook"))
    revoke_named(world.people["ada"], "oppo up")
    new = create_api_token(world.people["ada"], world.team, "oppo up")
    assert [user_for_token(made.text) is not None for made in (old, other, new)] == [False, True, True]


def test_services_of_one_name_that_are_made_at_once_have_accounts_of_their_own(world, at_once):
    made = at_once(*[lambda: create_service_token(world.people["ada"], world.team, "nightly", 1, "read")] * 6)
    names = ["nightly.service", *(f"nightly.service-{n}" for n in range(2, 7))]
    assert sorted(each.token.user.username for each in made) == sorted(names)
