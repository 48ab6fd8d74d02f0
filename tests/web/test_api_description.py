"""The API's description is true: every operation has a row here, answers what the document says, and denies whom it must.

`OPPO_RECORD=1 pytest tests/web/test_api_description.py` writes the examples of the document anew, from these calls.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import jsonschema_rs
import pytest
from django.test import Client

from oppo_platform.accounts.api_tokens import create_api_token
from oppo_platform.alerts.lifecycle import open_alert
from oppo_platform.alerts.models import Webhook
from oppo_platform.alerts.policy import Condition
from oppo_platform.alerts.webhooks import add_webhook
from oppo_platform.api.browser import api
from oppo_platform.api.description import EXAMPLES, every_operation
from oppo_platform.runs import steering
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.models import Checkpoint, Run
from oppo_platform.runs.saved_views import save_view
from oppo_platform.storage.trash import delete_run
from oppo_platform.telemetry.models import SampleRow
from tests.web.conftest import tiny_spec
from tests.web.telling import tell_everything

# One call for every operation, in this order: a path with names of `Scene`, and a body. A new operation needs a row.
CALLS = {
    "validate_spec": ("post", "runs/validate", {"spec": tiny_spec(steps=20)}),
    "submit_run": ("post", "runs", {"spec": tiny_spec(steps=20), "project": "demo"}),
    "list_runs": ("get", "runs?filter=state:running&sort=-reward&limit=2", None),
    "show_run": ("get", "runs/{run}", None),
    "download_spec": ("get", "runs/{run}/spec.yaml", None),
    "tag_run": ("post", "runs/{run}/tags", {"add": ["baseline"], "remove": []}),
    "pin_run": ("post", "runs/{run}/pin", None),
    "list_pinned_runs": ("get", "runs/pinned", None),
    "unpin_run": ("post", "runs/{run}/unpin", None),
    "list_filter_words": ("get", "runs/words", None),
    "show_metrics": ("get", "runs/{run}/metrics?keys=critic/score/mean&x=step&max_points=100", None),
    "show_usage": ("get", "runs/{run}/usage", None),
    "show_saving": ("get", "runs/{run}/saving", None),
    "list_decisions": ("get", "runs/{run}/decisions", None),
    "compare_runs": ("get", "compare?runs={run},{waiting}&keys=critic/score/mean&target=1.2", None),
    "list_samples": ("get", "runs/{run}/samples?sort=-score&limit=1", None),
    "show_sample": ("get", "runs/{run}/samples/{sample}", None),
    "show_timeline": ("get", "runs/{run}/timeline?from_step=1&to_step=1", None),
    "show_timeline_figure": ("get", "runs/{run}/timeline/figure?from_step=1&to_step=1", None),
    "download_trace": ("get", "runs/{run}/trace.json?from_step=1&to_step=1", None),
    "show_logs": ("get", "runs/{run}/logs?limit=2", None),
    "download_logs": ("get", "runs/{run}/logs.txt", None),
    "list_checkpoints": ("get", "runs/{run}/checkpoints", None),
    "download_checkpoint": ("get", "runs/{run}/checkpoints/{checkpoint}/download", None),
    "list_events": ("get", "runs/{run}/events?limit=3", None),
    "set_priority": ("post", "runs/{waiting}/priority", {"priority": 60}),
    "extend_run": ("post", "runs/{limited}/extend", {"hours": 2}),
    "pause_run": ("post", "runs/{waiting}/pause", None),
    "resume_run": ("post", "runs/{waiting}/resume", None),
    "resume_run_at": ("post", "runs/{paused}/checkpoints/{its_checkpoint}/resume", None),
    "silence_run": ("post", "runs/{run}/silence", {"silent": False}),
    "list_alerts": ("get", "alerts?open=true&limit=1", None),
    "count_unread_alerts": ("get", "alerts/unread", None),
    "acknowledge_alert": ("post", "alerts/{alert}/acknowledge", None),
    "mark_alerts_seen": ("post", "alerts/seen", {"up_to": 1}),
    "show_storage": ("get", "runs/{run}/storage", None),
    "list_storage": ("get", "storage", None),
    "cancel_run": ("post", "runs/{waiting}/cancel", None),
    "delete_run": ("delete", "runs/{waiting}", None),
    "list_trash": ("get", "trash", None),
    "restore_run": ("post", "runs/{waiting}/restore", None),
    "purge_run": ("post", "runs/{deleted}/purge", None),
    "save_view": ("post", "views", {"name": "best", "query": {"q": "state:running", "sort": "-reward"}}),
    "list_views": ("get", "views", None),
    "change_view": ("post", "views/{view}", {"name": "the best"}),
    "set_default_view": ("post", "views/default", {"view": None}),
    "delete_view": ("post", "views/{view}/delete", None),
    "restore_view": ("post", "views/{view}/restore", None),
    "show_queue": ("get", "queue", None),
    "show_cluster": ("get", "cluster", None),
    "list_quotas": ("get", "quotas", None),
    "list_teams": ("get", "teams", None),
    "show_team": ("get", "teams/{team}", None),
    "create_project": ("post", "teams/{team}/projects", {"name": "poems"}),
    "list_audit_entries": ("get", "teams/{team}/audit?action=run.submit", None),
    "add_webhook": ("post", "teams/{team}/webhooks", {"url": "https://example.org/hook", "conditions": ["failed"]}),
    "list_webhooks": ("get", "teams/{team}/webhooks", None),
    "change_webhook": ("post", "teams/{team}/webhooks/{webhook}", {"on": False, "conditions": ["failed", "finished"]}),
    "delete_webhook": ("delete", "teams/{team}/webhooks/{webhook}", None),
    "who_am_i": ("get", "me", None),
    "list_tokens": ("get", "tokens", None),
    "create_token": ("post", "tokens", {"name": "nightly", "scope": "submit", "days": 30, "service": True}),
    "revoke_token": ("delete", "tokens/{token}", None),
}
READS_BY_POST = {"validate_spec"}
# What takes more of a token than to read, or than to submit.
TAKES_SUBMIT = {"download_checkpoint"}
TAKES_ADMIN = {
    "create_token", "revoke_token", "list_audit_entries", "list_webhooks", "add_webhook", "change_webhook", "delete_webhook",
}  # fmt: skip
FILES = {"actor/model.safetensors": b"w" * 100, "state.json": b"{}"}


def save(worker, run, attempt_id, step, files=FILES):
    """A checkpoint that is written and registered."""
    url = f"{artifact_url(run.pk)}/checkpoints/step-{step:08d}"
    folder = Path(unquote(urlsplit(url).path))
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    manifest = json.dumps({n: {"sha256": hashlib.sha256(c).hexdigest(), "bytes": len(c)} for n, c in files.items()})
    (folder / "manifest.json").write_text(manifest)
    told = {"epoch": 1, "step": step, "url": url, "manifest_sha256": hashlib.sha256(manifest.encode()).hexdigest(), "bytes": 102}
    assert worker.attempt(attempt_id, "checkpoints", told).status_code == 200
    return Checkpoint.objects.get(run=run, step=step).pk


@pytest.fixture
def scene(world, events, settings, tmp_path):
    """Names in paths → ids: runs in several states that have told something of every kind, and what belongs to them."""
    settings.OPPO_ARTIFACT_ROOT = tmp_path.as_uri()
    first, second = world.worker(), world.worker("node2")
    run, attempt_id = world.start(first)
    tell_everything(first, attempt_id, events, steps=3)
    found = {"run": run.pk, "checkpoint": save(first, run, attempt_id, 2), "sample": SampleRow.objects.first().pk}
    found["alert"] = open_alert(run, Condition.KL_ABOVE, "KL to the reference: 63 nats.", 63.0, 50.0).pk
    world.submit("ben")
    world.cycle()
    held = Run.objects.get(user=world.people["ben"])
    attempt = held.attempts.get()
    assert second.claim(attempt.pk).status_code == 200
    assert second.attempt(attempt.pk, "heartbeat", {"epoch": 1, "running": True}).status_code == 200
    found |= {"paused": held.pk, "its_checkpoint": save(second, held, attempt.pk, 4)}
    steering.pause_run(held.pk, "user:ada")
    stopped = {"epoch": 1, "outcome": "paused", "exit_code": 0, "reason": "asked to stop", "last_log_lines": []}
    assert second.attempt(attempt.pk, "outcome", stopped).status_code == 200
    found |= {"waiting": world.submit().pk, "limited": world.submit(queue={"max_runtime_hours": 1}).pk}
    found["deleted"] = world.submit().pk
    steering.cancel_run(found["deleted"], "user:ada")
    delete_run(found["deleted"], "user:ada")
    found["view"] = save_view(world.people["ada"], "mine", {"q": "state:running"}, world.team)["id"]
    found["token"] = create_api_token(world.people["ada"], world.team, "old").token.pk
    add_webhook(world.people["ada"], world.team, "https://example.org/old", ["failed"])
    return found | {"team": world.team.pk, "webhook": Webhook.objects.get().pk}


def ask(client, method, path, body, scene):
    text = json.dumps(body) if body is not None else ""
    return client.generic(method.upper(), f"/api/v1/{path.format(**scene)}", text, content_type="application/json")


def bearer(made):
    return Client(headers={"Authorization": f"Bearer {made.text}"})


def document(world):
    return world.login("ada").get("/api/v1/openapi.json").json()


def described(found):
    return {told["operationId"]: told for path in found["paths"].values() for told in path.values()}


def test_every_operation_has_a_row():
    assert {api.get_openapi_operation_id(operation) for operation in every_operation(api)} == set(CALLS)


def test_every_call_is_answered_as_described(world, scene):
    told = document(world)
    operations, recorded = described(told), {}
    client = bearer(create_api_token(world.people["ada"], world.team, "all", scope="admin"))
    for name, (method, path, body) in CALLS.items():
        reply = ask(client, method, path, body, scene)
        status, well = next(iter(operations[name]["responses"].items()))
        text = b"" if reply.streaming else reply.content
        assert reply.status_code == int(status), (name, reply.status_code, text[:500])
        if "content" not in well:
            assert text == b"", name
            continue
        [(kind, content)] = well["content"].items()
        assert reply.headers["Content-Type"].split(";")[0] == kind, name
        if content["schema"] != {"type": "string"} and kind != "application/yaml":
            check(reply.json(), content["schema"], told, name)
            recorded[name] = {"path": path.format(**scene), "body": body, "reply": shortened(reply.json())}
    if os.environ.get("OPPO_RECORD"):
        EXAMPLES.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


def check(value, schema, told, name):
    whole = {**schema, "components": told["components"]}
    errors = [
        f"{'/'.join(map(str, e.instance_path))}: {e.message}" for e in jsonschema_rs.validator_for(whole).iter_errors(value)
    ]
    assert not errors, (name, errors[:5])


def shown_once(value):
    """A token or a secret, without what makes it one; None for everything else."""
    found = re.match(r"oppoapi_|whsec_", value) if isinstance(value, str) else None
    return found[0] + "…" if found else None


def shortened(value):
    """What an example shows of a reply: at most two of a list, and texts of a line."""
    if isinstance(value, dict):
        return {key: shown_once(each) or shortened(each) for key, each in list(value.items())[:40]}
    if isinstance(value, list):
        return [shortened(each) for each in value[:2]]
    return value[:117] + "…" if isinstance(value, str) and len(value) > 118 else value


def test_every_example_is_one(world):
    told = document(world)
    for name, operation in described(told).items():
        well = next(iter(operation["responses"].values()))
        for kind, content in well.get("content", {}).items():
            if content["schema"] != {"type": "string"} and kind != "application/yaml":
                assert "example" in content, f"{name}: record the examples anew"
                check(content["example"], content["schema"], told, name)
        for content in operation.get("requestBody", {}).get("content", {}).values():
            assert "example" in content, f"{name}: record the examples anew"
            check(content["example"], content["schema"], told, name)


def test_strangers_find_nothing(world, scene):
    """Eve owns another team: what has an id is a 404 for her, and lists hold nothing of this team."""
    eve = bearer(create_api_token(world.people["eve"], world.other_team, "hers", scope="admin"))
    names = re.compile("|".join(("Letters", "critic/score", "63 nats")))
    for name, (method, path, body) in CALLS.items():
        reply = ask(eve, method, path, body, scene)
        if "{" in path:
            assert (reply.status_code, reply.headers["Content-Type"]) == (404, "application/problem+json"), (name, reply.content)
        else:
            text = b"" if reply.streaming else reply.content
            assert not names.search(text.decode()), name


@pytest.mark.parametrize("scope", ["read", "submit", "admin"])
def test_every_operation_by_every_scope(world, scene, scope):
    """A token that reads reads everything and changes nothing; only one with `admin` makes tokens."""
    client = bearer(create_api_token(world.people["ada"], world.team, "one", scope=scope))
    for name, (method, path, body) in CALLS.items():
        reply = ask(client, method, path, body, scene)
        if scope == "read" and method != "get" and name not in READS_BY_POST:
            allowed = False
        else:
            allowed = scope == "admin" or name not in (TAKES_ADMIN if scope == "submit" else TAKES_ADMIN | TAKES_SUBMIT)
        assert (reply.status_code != 403) == allowed, (name, reply.status_code)
        assert reply.status_code < 500, name


def test_a_worker_s_tokens_open_nothing_here(world, scene, events):
    worker = world.worker("node3")
    for name, (method, path, body) in CALLS.items():
        for text in (worker.token, world.join_token):
            client = Client(headers={"Authorization": f"Bearer {text}"})
            assert ask(client, method, path, body, scene).status_code == 401, name


def test_what_is_not_there_is_a_problem_too(world):
    ada = world.login("ada")
    for method, path, status in (("get", "nothing", 404), ("get", "runs/x", 404), ("put", "runs", 405), ("post", "me", 405)):
        reply = ada.generic(method.upper(), f"/api/v1/{path}")
        assert (reply.status_code, reply.headers["Content-Type"]) == (status, "application/problem+json"), path
        assert reply.json()["request_id"] == reply.headers["X-Request-Id"]
    assert ada.put("/api/v1/runs").headers["Allow"] == "GET, POST"
