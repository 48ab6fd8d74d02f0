"""What people and programs send by mistake or in malice: it is refused in words, quickly, and never as a fault of the server."""

import hashlib
import json
import os
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from django.test import Client

from oppo_contract.spec_errors import SpecError
from oppo_contract.yaml_text import MAX_VALUES, check_size, dump_yaml, parse_yaml
from oppo_platform.accounts.api_tokens import create_api_token
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.models import Checkpoint

HALF = "\ud800"  # of a character


@pytest.fixture
def client(world):
    token = create_api_token(world.people["ada"], world.team, "notebook", scope="admin").text
    return Client(headers={"Authorization": f"Bearer {token}"}, raise_request_exception=False)


def post(client, path, body, **headers):
    text = body if isinstance(body, str | bytes) else json.dumps(body)
    return client.post(f"/api/v1/{path}", text, content_type="application/json", headers=headers)


def refused(reply, status):
    assert (reply.status_code, reply.headers["Content-Type"]) == (status, "application/problem+json"), reply.content[:300]
    return reply.json()["detail"]


@pytest.mark.parametrize("project", ["²", "1" * 5000, "٣"])
def test_digits_of_other_scripts_are_no_project_id(client, make_spec, project):
    refused(post(client, "runs", {"spec": make_spec(), "project": project}), 404)
    refused(client.get("/api/v1/runs", {"project": project}), 404)
    refused(client.get("/api/v1/runs/pinned", {"project": project}), 404)
    assert post(client, "runs/validate", {"spec": make_spec(), "project": project}).status_code == 200


def test_half_a_character_is_refused_where_the_database_would_have_to_hold_it(world, client, make_spec):
    run = world.submit()
    assert "half of a character" in refused(post(client, f"runs/{run.pk}/tags", {"add": [HALF]}), 422)
    refused(post(client, "views", {"name": HALF, "query": {}}), 422)
    refused(post(client, "runs", {"spec": make_spec(), "project": HALF}), 422)
    refused(post(client, f"runs/{run.pk}/tags", {"add": [HALF]}, **{"Idempotency-Key": "k"}), 422)


def test_a_spec_in_json_has_the_limits_of_one_in_yaml():
    for data in (json.loads("[" * 18 + "1" + "]" * 18), {"a": [1] * (MAX_VALUES // 2)}):
        check_size(data)
        parse_yaml(dump_yaml(data))
    for text in ("[" * 19 + "]" * 19, json.dumps([1] * MAX_VALUES), json.dumps("x" * 300_000)):
        for read in (parse_yaml, lambda text: check_size(json.loads(text))):
            with pytest.raises(SpecError):
                read(text)


def test_checking_a_monstrous_spec_takes_no_longer_than_reading_it(client):
    nested = '{"spec": {"a": %s}}' % ("[" * 300 + "]" * 300)
    wide = json.dumps({"spec": {"a": [1] * 600_000}})
    for body, words in ((nested, "nested deeper"), (wide, "more than 10,000")):
        began = time.process_time()
        told = post(client, "runs/validate", body)
        assert (told.status_code, told.json()["ok"], told.json()["yaml"]) == (200, False, None)
        assert words in told.json()["problems"][0]["message"]
        assert time.process_time() - began < 5, "writing so much as YAML takes a minute"
        refused(post(client, "runs", body), 422)


@pytest.mark.parametrize("key", [None, "k"])
def test_a_body_that_is_too_large_is_a_problem_with_and_without_a_key(client, settings, key):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    headers = {"Idempotency-Key": key} if key else {}
    assert "1,000 bytes" in refused(post(client, "runs", {"yaml": "x" * 1000}, **headers), 413)


def test_djangos_own_errors_are_problems(client):
    refused(client.get("/api/v1/me", headers={"Host": "elsewhere.example"}), 400)
    refused(client.get("/api/v1/me", headers={"If-Match": '"another"'}), 412)
    refused(client.put("/api/v1/me"), 405)


def test_a_repeated_write_is_one_of_the_tokens_minute(world, client, settings, minute):
    run = world.submit()
    settings.OPPO_API_RATE = 2
    replies = [post(client, f"runs/{run.pk}/tags", {"add": ["x"]}, **{"Idempotency-Key": "k"}) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert [reply.headers["RateLimit-Remaining"] for reply in replies] == ["1", "0", "0"]
    assert replies[1].headers["Idempotency-Replayed"] == "true"
    assert int(replies[2].headers["Retry-After"]) > 0
    refused(replies[2], 429)


@pytest.mark.parametrize("kind", ["login", "invite", "password"])
def test_a_link_with_nul_is_no_link(world, kind):
    place = {"login": "/login-link/", "invite": "/invites/", "password": "/password-links/"}[kind]
    reply = Client(raise_request_exception=False).get(f"{place}oppo{kind}_aaaaaaaaaaa%00_b")
    assert reply.status_code in (302, 404)


@pytest.fixture
def odd(world, client, settings, tmp_path):
    """Registers a checkpoint whose folder `spoil` has changed, and asks for its download."""
    settings.OPPO_ARTIFACT_ROOT = tmp_path.as_uri()
    run, attempt_id = world.start(world.worker())
    url = f"{artifact_url(run.pk)}/checkpoints/step-00000001"
    folder = Path(unquote(urlsplit(url).path))
    folder.mkdir(parents=True)

    def ask(manifest, spoil=lambda manifest: None):
        content = json.dumps(manifest).encode()
        (folder / "manifest.json").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        row = Checkpoint.objects.create(
            run=run, attempt_id=attempt_id, step=1, url=url, bytes=1, manifest_sha256=digest, registered_at=world.clock.now()
        )
        spoil(folder / "manifest.json")
        return client.get(f"/api/v1/runs/{run.pk}/checkpoints/{row.pk}/download")

    return ask


def as_folder(manifest):
    manifest.unlink()
    manifest.mkdir()


def as_pipe(manifest):
    manifest.unlink()
    os.mkfifo(manifest)


@pytest.mark.parametrize("spoil", [as_folder, as_pipe])
def test_a_manifest_that_is_no_plain_file_is_refused_at_once(odd, spoil):
    assert "not a regular file" in refused(odd({}, spoil), 409)


@pytest.mark.parametrize("manifest", [{"a": {"bytes": float("inf")}}, {f"a{HALF}": {"bytes": 1}}])
def test_a_manifest_that_says_what_cannot_be_is_refused(odd, manifest):
    assert "unknown format" in refused(odd(manifest), 409)


def test_write_with_an_invalid_or_missing_token_is_401_not_a_csrf_error(world):
    void = {"Authorization": "Bearer oppoapi_aaaaaaaaaaaa_b"}
    nobody, ada = Client(enforce_csrf_checks=True), world.login("ada", enforce_csrf_checks=True)
    for client, headers in ((nobody, {}), (nobody, void), (ada, void)):
        refused(post(client, "alerts/seen", {"up_to": 1}, **headers), 401)
        refused(post(client, "runs/validate", {}, **headers), 401)
    refused(ada.get("/api/v1/me", headers=void), 401)
    refused(post(ada, "alerts/seen", {"up_to": 1}), 403)


def test_a_proxys_own_password_hides_no_session(world):
    ada, basic = world.login("ada"), {"Authorization": "Basic YTpi"}
    assert ada.get("/api/v1/me", headers=basic).json()["user"] == "ada"
    assert post(ada, "alerts/seen", {"up_to": 1}, **basic).status_code == 200
    run = world.submit()
    stream = ada.get(f"/api/v1/stream?runs={run.pk}", headers=basic)
    assert stream.status_code == 200
    stream.close()


def test_unknown_query_parameters_are_refused_with_a_suggestion(world, client):
    run = world.submit()
    for path, name, near in (
        ("runs", "staet", "state"), (f"runs/{run.pk}/metrics", "max_point", "max_points"), (f"runs/{run.pk}", "verbose", None),
    ):  # fmt: skip
        reply = client.get(f"/api/v1/{path}", {"keys": "a", name: "1"} if "metrics" in path else {name: "1"})
        assert f"does not know {name}" in refused(reply, 422)
        assert reply.json()["errors"][0].get("suggestion") == near
    assert Client().get("/api/v1/runs?staet=1").status_code == 401


@pytest.mark.parametrize("query", ["target=NaN", "target=inf", "group=nope", "max_points=0", "max_points=20001", "max_points=-1"])
def test_comparisons_refuse_what_means_nothing(world, client, query):
    run = world.submit()
    words = refused(client.get(f"/api/v1/compare?runs={run.pk}&{query}"), 422)
    assert "group" not in query or words == "No compared run has the setting nope."


def test_bounds_are_in_the_document_and_kept(world, client):
    run = world.submit()
    schemas = client.get("/api/v1/openapi.json").json()["components"]["schemas"]
    priority = schemas["PriorityBody"]["properties"]["priority"]
    assert (priority["minimum"], priority["maximum"]) == (1, 99)
    for value in (0, 100, 1000):
        refused(post(client, f"runs/{run.pk}/priority", {"priority": value}), 422)
    refused(post(client, f"runs/{run.pk}/extend", {"hours": 0}), 422)


def test_head_is_get_without_a_body(world, client):
    run = world.submit()
    for path in (f"runs/{run.pk}", f"runs/{run.pk}/spec.yaml", "openapi.json"):
        whole, head = client.get(f"/api/v1/{path}"), client.head(f"/api/v1/{path}")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["Content-Type"] == whole.headers["Content-Type"]
        assert int(head.headers["Content-Length"]) == len(whole.content)
    assert client.head("/api/v1/runs/999999999").status_code == 404
    assert Client().head(f"/api/v1/runs/{run.pk}").status_code == 401
    assert client.head(f"/api/v1/runs/{run.pk}/pause").status_code == 405


def test_validate_knows_projects(world, client, make_spec):
    world.worker()
    known = world.project.name
    reply = post(client, "runs/validate", {"spec": make_spec(), "project": known + "x"}).json()
    assert (reply["ok"], reply["problems"][0]["path"], reply["problems"][0]["suggestion"]) == (False, "project", known)
    assert reply["spec"] is not None, "the spec itself is still checked"
    assert post(client, "runs/validate", {"spec": make_spec(), "project": known}).json()["ok"]


def test_the_document_has_the_spec_and_the_stream(client):
    document = client.get("/api/v1/openapi.json").json()
    body = document["components"]["schemas"]["SpecBody"]["properties"]["spec"]
    assert {"$ref": "#/components/schemas/RunSpec"} in body["anyOf"]
    assert document["components"]["schemas"]["RunSpec"]["properties"]["steps"]["minimum"] == 1
    stream = document["paths"]["/api/v1/stream"]["get"]
    assert list(stream["responses"]["200"]["content"]) == ["text/event-stream"]
