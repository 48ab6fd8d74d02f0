"""What holds for every call of the JSON API: ids, problems, ETags, rates, and writes that are sent twice."""

import json
import threading

import pytest
from django.db import connection
from django.test import Client

from oppo_platform.accounts.api_tokens import create_api_token
from oppo_platform.accounts.models import ApiToken, IdempotentReply
from oppo_platform.api import idempotency
from oppo_platform.runs.models import Run


@pytest.fixture
def token(world):
    return create_api_token(world.people["ada"], world.team, "notebook", scope="admin")


def bearer(made, **headers):
    return Client(headers={"Authorization": f"Bearer {made.text}", **headers})


def submit(client, spec, key=None):
    headers = {"Idempotency-Key": key} if key else {}
    return client.post("/api/v1/runs", {"spec": spec}, content_type="application/json", headers=headers)


def test_every_reply_has_an_id_and_problems_tell_it(world, token):
    client = bearer(token)
    own = client.get("/api/v1/runs/999", headers={"X-Request-Id": "nightly-7"})
    assert (own.headers["X-Request-Id"], own.json()["request_id"]) == ("nightly-7", "nightly-7")
    bad = client.get("/api/v1/runs/999", headers={"X-Request-Id": "two\nlines"})
    assert len(bad.headers["X-Request-Id"]) == 32
    assert bad.json()["request_id"] == bad.headers["X-Request-Id"]
    assert len(Client().get("/accounts/login/").headers["X-Request-Id"]) == 32


def test_unexpected_error_is_a_problem_and_logged(world, token, monkeypatch, caplog):
    monkeypatch.setattr("oppo_platform.usecases.plan_review.run_summary", lambda run: 1 / 0)
    run = world.submit()
    reply = bearer(token).get(f"/api/v1/runs/{run.pk}", headers={"X-Request-Id": "seven"})
    assert (reply.status_code, reply.headers["Content-Type"]) == (500, "application/problem+json")
    assert reply.json()["request_id"] == "seven"
    assert "division" not in reply.content.decode()
    assert "ZeroDivisionError" in caplog.text or "division by zero" in caplog.text


def test_unchanged_response_is_304_without_a_body(world, token, minute):
    run, client = world.submit(), bearer(token)
    first = client.get(f"/api/v1/runs/{run.pk}")
    tag = first.headers["ETag"]
    assert "private" in first.headers["Cache-Control"]
    again = client.get(f"/api/v1/runs/{run.pk}", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert int(again.headers["RateLimit-Remaining"]) == int(first.headers["RateLimit-Remaining"]) - 1
    words = client.get("/api/v1/runs/words")
    packed = client.get("/api/v1/runs/words", headers={"Accept-Encoding": "br"})
    assert (packed.headers["Content-Encoding"], packed.headers["ETag"] != words.headers["ETag"]) == ("br", True)
    known = {"Accept-Encoding": "br", "If-None-Match": packed.headers["ETag"]}
    assert client.get("/api/v1/runs/words", headers=known).status_code == 304
    assert client.get(f"/api/v1/runs/{run.pk}", headers={"If-None-Match": f"W/{tag}"}).status_code == 304
    client.post(f"/api/v1/runs/{run.pk}/tags", {"add": ["x"]}, content_type="application/json")
    assert client.get(f"/api/v1/runs/{run.pk}", headers={"If-None-Match": tag}).status_code == 200
    assert "ETag" not in world.login("ada").get("/runs").headers


def test_a_token_has_so_many_requests_a_minute_and_hears_what_is_left(world, token, settings, minute):
    minute.now = 1_800_000_030.0
    settings.OPPO_API_RATE = 3
    client = bearer(token)
    left = [client.get("/api/v1/me").headers["RateLimit-Remaining"] for _ in range(3)]
    assert left == ["2", "1", "0"]
    over = client.get("/api/v1/me")
    assert (over.status_code, over.headers["Retry-After"], over.headers["RateLimit-Limit"]) == (429, "31", "3")
    assert "stream" in over.json()["detail"]
    assert bearer(create_api_token(world.people["ada"], world.team, "other")).get("/api/v1/me").status_code == 200
    assert "RateLimit-Limit" not in world.login("ada").get("/api/v1/me").headers
    minute.now = 1_800_000_060.0
    assert client.get("/api/v1/me").status_code == 200


def test_without_its_counter_the_platform_serves_on(world, token, settings):
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    reply = bearer(token).get("/api/v1/me")
    assert reply.status_code == 200
    assert "RateLimit-Limit" not in reply.headers


def test_a_write_that_is_sent_twice_happens_once(world, token, make_spec):
    world.worker()
    client, spec = bearer(token), make_spec()
    first, second = submit(client, spec, "k1"), submit(client, spec, "k1")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert [r.headers.get("Idempotency-Replayed") for r in (first, second)] == [None, "true"]
    assert submit(client, spec, "k2").json()["id"] != first.json()["id"]
    assert Run.objects.count() == 2
    other = submit(client, make_spec(name="another"), "k1")
    assert (other.status_code, "a different request" in other.json()["detail"]) == (422, True)


def test_keys_are_a_tokens_own_and_end_with_it(world, token, make_spec):
    world.worker()
    other = create_api_token(world.people["ada"], world.team, "other")
    assert submit(bearer(token), make_spec(), "k").json()["id"] != submit(bearer(other), make_spec(), "k").json()["id"]
    ApiToken.objects.filter(pk=token.token.pk).update(revoked_at=world.clock.now())
    assert submit(bearer(token), make_spec(), "k").status_code == 401


def test_keys_of_who_is_logged_in_are_their_own(world, token, make_spec):
    world.worker()
    spec = make_spec()
    ada, max_, by_token = world.login("ada"), world.login("max"), bearer(token)
    told = [submit(client, spec, "k") for client in (ada, world.login("ada"), max_, by_token, ada)]
    assert [reply.headers.get("Idempotency-Replayed") for reply in told] == [None, "true", None, None, "true"]
    first, again, of_max, of_token, last = (reply.json()["id"] for reply in told)
    assert (first == again == last, len({first, of_max, of_token}), Run.objects.count()) == (True, 3, 3)
    strict = world.login("ada", enforce_csrf_checks=True)
    assert submit(strict, make_spec(name="forged"), "k2").status_code == 403
    assert not IdempotentReply.objects.filter(key="k2").exists()


def test_a_refusal_is_not_kept_and_the_next_try_counts(world, token, make_spec):
    client, spec = bearer(token), make_spec()
    assert submit(client, spec, "k").status_code == 422, "no node offers the prompts yet"
    assert not IdempotentReply.objects.exists()
    world.worker()
    assert submit(client, spec, "k").status_code == 201


def test_a_deed_that_fails_halfway_leaves_neither_deed_nor_key(world, token, make_spec, monkeypatch):
    world.worker()

    def broken(kept, response):
        raise RuntimeError("the process dies here")

    with monkeypatch.context() as patched:
        patched.setattr(idempotency, "_store", broken)
        with pytest.raises(RuntimeError):
            submit(bearer(token), make_spec(), "k")
    assert (Run.objects.count(), IdempotentReply.objects.count()) == (0, 0)
    assert submit(bearer(token), make_spec(), "k").status_code == 201


def test_of_two_at_once_one_acts_and_both_hear_the_same(world, token, make_spec, at_once):
    world.worker()
    spec = make_spec()
    replies = at_once(*[lambda: submit(bearer(token), spec, "k")] * 4)
    assert [reply.status_code for reply in replies] == [201] * 4
    assert len({reply.content for reply in replies}) == 1
    assert Run.objects.count() == 1


def test_repetition_that_waits_too_long_gets_409_with_retry_after(world, token, make_spec, monkeypatch):
    world.worker()
    monkeypatch.setattr(idempotency, "WAITS_FOR_THE_FIRST_MS", 200)
    inside, go_on = threading.Event(), threading.Event()
    keep = idempotency._store

    def slow(kept, response):
        inside.set()
        assert go_on.wait(30)
        keep(kept, response)

    monkeypatch.setattr(idempotency, "_store", slow)
    spec, replies = make_spec(), []

    def first():
        replies.append(submit(bearer(token), spec, "k"))
        connection.close()

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(30)
    second = submit(bearer(token), spec, "k")
    go_on.set()
    thread.join(30)
    assert (second.status_code, second.headers["Retry-After"], replies[0].status_code) == (409, "5", 201)
    assert Run.objects.count() == 1


def test_a_secret_is_not_kept_for_a_repetition(world, token):
    ask = {"name": "laptop"}
    headers = {"Idempotency-Key": "k"}
    first = bearer(token).post("/api/v1/tokens", ask, content_type="application/json", headers=headers)
    again = bearer(token).post("/api/v1/tokens", ask, content_type="application/json", headers=headers)
    assert (first.status_code, again.status_code) == (201, 409)
    assert "contained a secret" in again.json()["detail"]
    assert first.json()["token"].encode() not in b"".join(bytes(row.body) for row in IdempotentReply.objects.all())
    assert ApiToken.objects.count() == 2


@pytest.mark.parametrize("key", ["", "x" * 201])
def test_a_key_that_will_not_do_is_refused(world, token, make_spec, key):
    client = bearer(token)
    reply = client.post("/api/v1/runs", json.dumps({"spec": make_spec()}), "application/json", headers={"Idempotency-Key": key})
    assert reply.status_code == 422
    assert "Idempotency-Key" in reply.json()["detail"]


def test_keys_work_at_addresses_with_ids(world, token):
    headers = {"Idempotency-Key": "k"}
    other = create_api_token(world.people["ada"], world.team, "other").token.pk
    replies = [bearer(token).delete(f"/api/v1/tokens/{other}", headers=headers) for _ in range(2)]
    assert [(reply.status_code, reply.headers.get("Idempotency-Replayed")) for reply in replies] == [(204, None), (204, "true")]


def test_keys_are_forgotten_after_a_day(world, token, make_spec):
    world.worker()
    submit(bearer(token), make_spec(), "k")
    world.clock.advance(86_399)
    assert idempotency.forget_old_replies() == 0
    world.clock.advance(2)
    assert idempotency.forget_old_replies() == 1


def test_null_characters_are_refused(world, token):
    client, page = bearer(token), world.login("ada")
    for path in ("runs/pinned?project=a%00b", "runs?project=%00"):
        reply = client.get(f"/api/v1/{path}")
        assert (reply.status_code, "NUL" in reply.json()["detail"]) == (422, True), path
    projects = f"/api/v1/teams/{world.team.pk}/projects"
    assert client.post(projects, '{"name": "a\\u0000b"}', content_type="application/json").status_code == 422
    assert page.post(f"/teams/{world.team.pk}/projects", {"name": "a\0b"}).status_code == 422
