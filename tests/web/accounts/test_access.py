"""Who is who, and what cannot be asked for. Who may do what, address by address, is `matrix`."""

import pytest
from django.test import Client

from oppo_platform.accounts.api_tokens import create_api_token
from oppo_platform.accounts.models import ApiToken
from oppo_platform.runs.models import Run


def test_the_gate_answers_machines_with_401_and_a_challenge(world):
    reply = Client().get("/api/v1/runs")
    assert (reply.status_code, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert reply.json()["status"] == 401


def test_the_description_of_the_api_is_for_people_who_are_logged_in(world):
    assert "/api/v1/runs" in world.login("vic").get("/api/v1/openapi.json").json()["paths"]


def test_impossible_ids_are_404(world):
    ada = world.login("ada")
    huge = 10**30
    for path in ("runs/999", f"runs/{huge}", f"compare?runs={huge}", "compare?runs=x", f"stream?runs={huge}", "stream?runs=-1"):
        assert ada.get(f"/api/v1/{path}").status_code == 404, path
    unreadable = "9" * 5000  # more digits than Python turns into a number
    assert ada.get(f"/api/v1/compare?runs={unreadable}").status_code == 404
    assert ada.post("/teams/current", {"team": unreadable}).status_code == 404


@pytest.mark.parametrize(("name", "submits", "cancels_others"), [("vic", 403, 403), ("ben", 201, 403), ("max", 201, 200)])
def test_roles(world, make_spec, name, submits, cancels_others):
    world.worker()
    run = world.submit("ada")
    client = world.login(name)
    assert client.post("/api/v1/runs", {"spec": make_spec()}, content_type="application/json").status_code == submits
    assert client.post(f"/api/v1/runs/{run.pk}/cancel").status_code == cancels_others


def test_submitting_to_another_teams_project_is_404(world, make_spec):
    world.worker()
    body = {"spec": make_spec(), "project": world.other_project.pk}
    assert world.login("ada").post("/api/v1/runs", body, content_type="application/json").status_code == 404
    assert not Run.objects.exists()


def test_writes_by_session_need_a_csrf_token(world):
    run = world.submit()
    client = world.login("ada", enforce_csrf_checks=True)
    assert client.post(f"/api/v1/runs/{run.pk}/cancel").status_code == 403
    client.get("/accounts/login/")
    token = client.cookies["oppo_csrf"].value if "oppo_csrf" in client.cookies else None
    if token is None:
        from django.middleware.csrf import _get_new_csrf_string

        token = _get_new_csrf_string()
        client.cookies["oppo_csrf"] = token
    reply = client.post(f"/api/v1/runs/{run.pk}/cancel", headers={"X-CSRFToken": token})
    assert reply.status_code == 200


def bearer(token):
    return Client(enforce_csrf_checks=True, headers={"Authorization": f"Bearer {token}"})


def test_an_api_token_acts_for_its_person_within_its_team(world, make_spec):
    from oppo_platform.accounts.models import Membership

    world.worker()
    Membership.objects.create(team=world.other_team, user=world.people["ada"], role="owner")
    mine = world.submit()
    token = create_api_token(world.people["ada"], world.team, "notebook").text
    foreign = create_api_token(world.people["ada"], world.other_team, "other").text
    assert bearer(token).get(f"/api/v1/runs/{mine.pk}").status_code == 200
    assert bearer(foreign).get(f"/api/v1/runs/{mine.pk}").status_code == 404
    body = {"spec": make_spec(), "project": world.project.pk}
    assert bearer(token).post("/api/v1/runs", body, content_type="application/json").status_code == 201
    assert bearer(foreign).post("/api/v1/runs", body, content_type="application/json").status_code == 404
    assert bearer(token[:-1] + ("0" if token[-1] != "0" else "1")).get("/api/v1/runs").status_code == 401


def test_expired_revoked_and_orphaned_tokens_are_void(world):
    token = create_api_token(world.people["ada"], world.team, "short", days=1).text
    assert bearer(token).get("/api/v1/runs").status_code == 200
    world.clock.advance(86_401)
    assert bearer(token).get("/api/v1/runs").status_code == 401
    token = create_api_token(world.people["ada"], world.team, "long").text
    ApiToken.objects.filter(name="long").update(revoked_at=world.clock.now())
    assert bearer(token).get("/api/v1/runs").status_code == 401
    token = create_api_token(world.people["ada"], world.team, "leaver").text
    world.people["ada"].memberships.all().delete()
    assert bearer(token).get("/api/v1/runs").json()["items"] == []


def test_a_workers_token_opens_no_page_and_a_persons_no_worker_call(world):
    worker = world.worker()
    assert bearer(worker.token).get("/api/v1/runs").status_code == 401
    token = create_api_token(world.people["ada"], world.team, "t").text
    assert worker.post("heartbeat", {"devices": [], "attempts": []}, token).status_code == 401
