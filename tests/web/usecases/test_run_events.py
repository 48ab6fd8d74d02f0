"""What befell a run, on one list: every kind, in order, in pages, searched, and only for who may see the run."""

from __future__ import annotations

import pytest

from oppo_platform.runs.attempts import artifact_url
from oppo_platform.telemetry.models import Decision


def decision(seq, step, old, new, time):
    told = {"controller": "chunk", "old": old, "new": new, "reason": f"trial {step}: faster"}
    return {"kind": "decision", "producer": "engine", "seq": seq, "time": time, "step": step, **told}


@pytest.fixture
def told(world, events):
    """(world, run, worker, attempt id, get): a run that started, decided twice, saved once, and was reprioritised."""
    worker = world.worker()
    run, attempt_id = world.start(worker)
    at = world.clock.now().timestamp()
    batch = [events.started(1), events.step(2, 1, m=1.0), events.step(3, 2, m=1.0)]
    worker.send_events(attempt_id, [*batch, decision(4, 1, 8, 16, at + 1), decision(5, 2, 16, 16, at + 2)])
    world.clock.advance(3)
    saved = {"epoch": 1, "step": 2, "url": f"{artifact_url(run.pk)}/checkpoints/step-00000002"}
    worker.attempt(attempt_id, "checkpoints", {**saved, "manifest_sha256": "0", "bytes": 3 * 2**20})
    world.clock.advance(1)
    client = world.login("ada")
    client.post(f"/api/v1/runs/{run.pk}/priority", {"priority": 70}, content_type="application/json")

    def get(**query):
        return world.login("vic").get(f"/api/v1/runs/{run.pk}/events", query)

    return world, run, worker, attempt_id, get


def kinds(reply):
    return [event["kind"] for event in reply.json()["items"]]


def test_everything_is_on_one_list_newest_first(told):
    get = told[-1]
    items = get().json()["items"]
    assert [(e["kind"], e["new"]) for e in items] == [
        ("change", None),
        ("checkpoint", None),
        ("decision", 16.0),
        ("state", "running"),
        ("state", "starting"),
        ("state", "allocated"),
        ("state", "queued"),
    ]
    change, checkpoint, chosen, running, *_ = items
    assert (change["actor"], change["what"] != "") == ("user:ada", True)
    assert (checkpoint["step"], checkpoint["what"], checkpoint["text"]) == (2, "step-00000002", "3 MiB, by attempt 1")
    assert (chosen["step"], chosen["old"], chosen["text"]) == (1, 8.0, "trial 1: faster")
    assert chosen["at"] == "2026-11-01T12:00:01+00:00"
    assert (running["old"], running["step"]) == ("starting", None)


def test_decisions_after_a_step(told):
    world, run, *_ = told
    vic = world.login("vic")
    steps = {-1: [1, 2], 0: [1, 2], 1: [2], 2: [], 10**30: []}
    for since, after in steps.items():
        items = vic.get(f"/api/v1/runs/{run.pk}/decisions", {"since_step": since}).json()["items"]
        assert [decision["step"] for decision in items] == after


def test_kinds_keeps_and_search(told):
    get = told[-1]
    assert kinds(get(kinds="decision", keeps="true")) == ["decision", "decision"]
    assert kinds(get(kinds="checkpoint,change")) == ["change", "checkpoint"]
    assert kinds(get(q="TRIAL faster")) == ["decision"]
    assert kinds(get(q="user:ada", kinds="change,state")) == ["change", "state"]
    assert kinds(get(q="%")) == []
    for query in ({"kinds": "x"}, {"cursor": "x"}, {"cursor": "WyJ4IiwgMSwgMV0"}, {"cursor": "WzEsIDEsIDFd"}):
        assert get(**query).status_code == 422, query


def test_pages_join_to_the_whole_even_at_one_moment(told):
    world, _, _, attempt_id, get = told
    at = world.clock.now()
    Decision.objects.bulk_create(
        Decision(attempt_id=attempt_id, step=2, controller="kl", old=i, new=i + 1, reason="", at=at if i % 2 else None)
        for i in range(5)
    )
    whole = [(e["kind"], e["id"]) for e in get().json()["items"]]
    assert len(whole) == len(set(whole)) == 12
    for limit in (1, 2, 5):
        joined, cursor = [], ""
        while cursor is not None:
            page = get(limit=limit, cursor=cursor).json()
            joined += [(e["kind"], e["id"]) for e in page["items"]]
            cursor = page["next"]
        assert joined == whole, limit


def test_another_teams_history_does_not_exist(told):
    world, run, *_ = told
    eve = world.login("eve")
    assert eve.get(f"/api/v1/runs/{run.pk}/events").status_code == 404
    assert eve.get(f"/runs/{run.pk}/events").status_code == 404
    assert eve.get(f"/api/v1/runs/{run.pk}/spec.yaml").status_code == 404
