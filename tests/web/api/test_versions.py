"""Workers of the version before are served in their own words; others get no work, and what runs on them goes on."""

import json
from pathlib import Path

import pytest
from django.test import Client

from oppo_contract import wire
from oppo_platform.cluster.models import Node
from oppo_platform.runs.lifecycle import cancel_run
from oppo_platform.runs.models import Attempt, Run

RECORDED = Path(__file__).with_name("recorded") / "wire-4.json"
BEFORE = {wire.VERSION_HEADER: "4"}
NEWER = {wire.VERSION_HEADER: str(wire.WIRE_VERSION + 1)}


def say(path, body, token, **headers):
    return Client().post(
        f"/api/worker/v1/{path}", json.dumps(body), content_type="application/json",
        headers={"Authorization": f"Bearer {token}", **headers},
    )  # fmt: skip


@pytest.mark.skipif(
    4 not in wire.SUPPORTED_VERSIONS, reason="version 4 is not supported any more; record the calls of the version before"
)
def test_a_worker_of_version_4_is_served_from_join_to_outcome(world, settings):
    tokens, known = {"join": world.join_token}, {"artifacts": settings.OPPO_ARTIFACT_ROOT}
    for call in json.loads(RECORDED.read_text())["calls"]:
        if call.get("do") == "submit":
            run = world.submit()
            world.cycle()
            known |= {"run": run.pk, "attempt": run.attempts.get().pk}
            continue
        if call.get("do") == "cancel":
            cancel_run(known["run"], "user:ada")
            continue
        body = json.loads(
            json.dumps(call["body"]).replace("{artifacts}", known["artifacts"]).replace("{run}", str(known.get("run")))
        )
        reply = say(call["path"].format(**known), body, tokens[call["token"]], **BEFORE)
        assert reply.status_code == call.get("status", 200), (call["path"], reply.content)
        told = reply.json()
        assert set(told) <= set(call["reply"]), call["path"]
        for key, allowed in call.get("nested", {}).items():
            assert told[key]
            assert all(set(item) <= set(allowed) for item in told[key])
        tokens |= {
            "node": told.get("node_token", tokens.get("node")),
            "attempt": told.get("attempt_token", tokens.get("attempt")),
        }
    assert Run.objects.get().state == "cancelled"


def test_newer_fields_are_omitted_for_older_workers(monkeypatch):
    monkeypatch.setitem(wire.ADDED_IN_VERSION, ("AttemptOrders", "deadline_s"), 2)
    orders = wire.AttemptOrders(lease_s=5)
    assert set(json.loads(wire.encode_reply(orders, 1))) == {"lease_s", "signal"}
    assert set(json.loads(wire.encode_reply(orders, 2))) == {"lease_s", "signal", "deadline_s"}


def test_every_field_that_came_later_is_there():
    for (model, field), since in wire.ADDED_IN_VERSION.items():
        assert field in getattr(wire, model).model_fields
        assert 1 < since <= wire.WIRE_VERSION


def beat(worker, version, attempts=(), **more):
    body = {
        "wire_version": version, "devices": [{"index": 0, "kind": "cpu", "model": "m", "memory_bytes": 1, **more}],
        "attempts": [{"attempt_id": a, "epoch": 1} for a in attempts], "catalogue": None,
    }  # fmt: skip
    return say("heartbeat", body, worker.token, **{wire.VERSION_HEADER: str(version)})


@pytest.mark.parametrize("version", [wire.SUPPORTED_VERSIONS[0] - 1, wire.WIRE_VERSION + 1])
def test_a_node_of_another_version_gets_no_work_and_what_runs_there_goes_on(world, version):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    more = {"temperature_c": 70} if version > wire.WIRE_VERSION else {}  # what a newer worker might add
    newer = {"delete": []} if more else {}
    assert beat(worker, version, [attempt_id], **more).json() == {"unclaimed": [], "stop": [], "catalogue_wanted": False} | newer
    token = worker.attempt_tokens[attempt_id]
    told = {"epoch": 1, "running": True, **({"watts": 300} if more else {})}
    headers = {wire.VERSION_HEADER: str(version)}
    assert say(f"attempts/{attempt_id}/heartbeat", told, token, **headers).status_code == 200
    ended = say(f"attempts/{attempt_id}/outcome", {"epoch": 1, "outcome": "succeeded", "reason": "done"}, token, **headers)
    assert ended.status_code == 200
    second = world.submit()
    world.cycle()
    second.refresh_from_db()
    run.refresh_from_db()
    assert (run.state, second.state) == ("succeeded", "queued")
    page = world.login("ada").get("/sharing").content.decode()
    assert f"its worker uses protocol version {version}, the platform supports 4 and 5" in page
    assert beat(worker, wire.WIRE_VERSION).status_code == 200  # updated
    world.cycle()
    second.refresh_from_db()
    assert second.state == "allocated"


@pytest.mark.parametrize(("version", "sent"), [(4, False), (wire.WIRE_VERSION, True)])
def test_an_older_worker_is_not_sent_newer_settings_with_their_defaults(world, version, sent):
    worker = world.worker()
    assert beat(worker, version).status_code == 200
    run = world.submit()
    world.cycle()
    attempt_id = run.attempts.get().pk
    headers = {wire.VERSION_HEADER: str(version)}
    claimed = say(f"attempts/{attempt_id}/claim", {"epoch": 1}, worker.token, **headers)
    assert claimed.status_code == 200, claimed.content
    assert ("tis_floor" in claimed.json()["spec"]["ppo"]) is sent
    assert "tis_floor" in Run.objects.get().spec["ppo"], "the run's own spec has every setting"


def test_unclaimed_launch_of_a_node_with_a_changed_version_is_allocated_elsewhere(world):
    worker = world.worker("node1")
    run = world.submit()
    world.cycle()
    beat(worker, wire.WIRE_VERSION + 1)
    world.worker("node2")
    world.cycle()
    assert [a.node.name for a in Attempt.objects.filter(run=run).order_by("epoch")] == ["node1", "node2"]


def test_unknown_keys_are_forgiven_to_newer_workers_only(world):
    worker = world.worker()
    body = {"devices": [], "attempts": [], "extra": 1}
    assert say("heartbeat", body, worker.token).status_code == 422
    assert say("heartbeat", body, worker.token, **NEWER).status_code == 200
    assert say("heartbeat", {**body, "attempts": 1}, worker.token, **NEWER).status_code == 422
    assert Node.objects.get().wire_version == wire.WIRE_VERSION
