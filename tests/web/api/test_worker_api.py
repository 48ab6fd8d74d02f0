"""The workers' API: tokens, claims, signals, outcomes, orphans."""

import httpx
import pytest

from oppo_contract import wire
from oppo_platform.cluster.models import CatalogueItem, Node
from oppo_platform.runs.lifecycle import cancel_run
from oppo_platform.runs.models import Attempt, Checkpoint, Run
from worker.platform_api import PlatformApi, RefusedError, UnacceptableError, Unreachable


def test_joining_needs_a_valid_join_token(world):
    worker = world.worker()
    body = {"name": "evil", "hostname": "h", "cpus": 1, "memory_bytes": 1}
    for token in ("", "nonsense", worker.token, world.join_token[:-1] + ("0" if world.join_token[-1] != "0" else "1")):
        assert worker.post("join", body, token).status_code == 401
    world.clock.advance(1001 * 3600)
    assert worker.post("join", body, world.join_token).status_code == 401
    assert not Node.objects.filter(name="evil").exists()


def test_joining_again_voids_the_old_token(world):
    first = world.worker("node1")
    second = world.worker("node1")
    assert Node.objects.count() == 1
    assert first.post("heartbeat", {"devices": [], "attempts": []}, first.token).status_code == 401
    assert second.post("heartbeat", {"devices": [], "attempts": []}, second.token).status_code == 200


def test_tokens_are_stored_as_digests_only(world):
    worker = world.worker()
    node = Node.objects.get()
    secret = worker.token.rsplit("_", 1)[1]
    assert secret not in {node.token_digest, node.token_prefix}
    assert len(node.token_digest) == 64


def test_the_catalogue_is_asked_for_until_it_came(world, make_entry):
    worker = world.worker()
    assert worker.heartbeat()["catalogue_wanted"] is False
    worker.heartbeat(catalogue=[make_entry("only")])
    assert list(CatalogueItem.objects.values_list("entry_id", flat=True)) == ["only"]
    again = world.worker("node1", catalogue=[])
    assert again.heartbeat()["catalogue_wanted"] is False
    assert not CatalogueItem.objects.exists()


def test_of_many_claims_at_once_one_works(world, at_once):
    worker = world.worker()
    run = world.submit()
    world.cycle()
    attempt_id = run.attempts.get().pk
    replies = at_once(*[lambda: worker.claim(attempt_id)] * 4)
    assert sorted(reply.status_code for reply in replies) == [200, 409, 409, 409]
    assert {reply.json()["reason"] for reply in replies if reply.status_code == 409} == {"already_claimed"}
    assert Run.objects.get().state == "starting"


def test_a_claim_is_refused_to_others_and_under_another_epoch(world):
    worker, other = world.worker("node1"), world.worker("node2", catalogue=[])
    run = world.submit()
    world.cycle()
    attempt_id = run.attempts.get().pk
    assert other.claim(attempt_id).json()["reason"] == "not_your_node"
    assert worker.claim(attempt_id, epoch=2).json()["reason"] == "stale_epoch"
    assert worker.claim(99999).json()["reason"] == "not_your_node"
    claimed = worker.claim(attempt_id).json()
    assert claimed["device_indices"] == [0]
    assert claimed["spec"]["name"] == "demo"
    assert claimed["artifact_url"].startswith("file:///")


def test_an_attempts_token_opens_no_other_attempt(world):
    worker = world.worker(devices=2, kind="cuda")
    _, first = world.start(worker)
    _, second = world.start(worker)
    token = worker.attempt_tokens[first]
    assert worker.post(f"attempts/{second}/heartbeat", {"epoch": 1}, token).status_code == 404
    assert worker.post(f"attempts/{first}/heartbeat", {"epoch": 1}, worker.token).status_code == 401
    assert worker.post(f"attempts/{first}/heartbeat", {"epoch": 1}, token).status_code == 200


def test_cancelling_reaches_the_engine_and_ends_the_run(world):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    assert worker.attempt(attempt_id, "heartbeat", {"epoch": 1, "running": True}).json()["signal"] is None
    cancel_run(run.pk, "user:ada")
    run.refresh_from_db()
    assert (run.state, run.reason) == ("cancelling", "Cancelled by ada.")
    assert worker.attempt(attempt_id, "heartbeat", {"epoch": 1, "running": True}).json()["signal"] == "cancel"
    worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": "cancelled", "reason": "Stopped at step 3."})
    run.refresh_from_db()
    assert (run.state, run.reason) == ("cancelled", "Cancelled by ada.")


@pytest.mark.parametrize(("outcome", "state"), [("succeeded", "succeeded"), ("failed", "failed"), ("engine_died", "cancelled")])
def test_an_engine_that_was_faster_than_the_wish_to_cancel(world, outcome, state):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    cancel_run(run.pk, "user:ada")
    worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": outcome, "reason": "so it was"})
    run.refresh_from_db()
    assert run.state == state


def test_an_allocated_run_is_cancelled_at_once_and_cannot_be_claimed(world):
    worker = world.worker()
    run = world.submit()
    world.cycle()
    cancel_run(run.pk, "user:ada")
    run.refresh_from_db()
    assert run.state == "cancelled"
    assert worker.claim(run.attempts.get().pk).json()["reason"] == "ended"
    second = world.submit()
    world.cycle()
    second.refresh_from_db()
    assert second.state == "allocated"


def test_the_same_outcome_may_be_told_again(world):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    told = {"epoch": 1, "outcome": "succeeded", "reason": "done", "last_log_lines": ["bye"]}
    assert [worker.attempt(attempt_id, "outcome", told).status_code for _ in range(2)] == [200, 200]
    other = worker.attempt(attempt_id, "outcome", {**told, "outcome": "failed"})
    assert (other.status_code, other.json()["reason"]) == (409, "ended")
    run.refresh_from_db()
    assert (run.state, run.last_log_lines) == ("succeeded", ["bye"])


def test_an_outcome_may_quote_what_no_database_holds(world):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    told = {"epoch": 1, "outcome": "failed", "reason": "ValueError: 'a\0b'", "last_log_lines": ["a\0b"]}
    assert worker.attempt(attempt_id, "outcome", told).status_code == 200
    run.refresh_from_db()
    assert (run.state, run.reason, run.last_log_lines) == ("failed", "ValueError: 'a\ufffdb'", ["a\ufffdb"])


def test_a_finished_event_does_not_end_the_run(world):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    event = {"kind": "finished", "producer": "engine", "seq": 1, "time": 1.0, "outcome": "succeeded", "step": 1, "reason": "x"}
    assert worker.send_events(attempt_id, [event]).status_code == 200
    run.refresh_from_db()
    assert run.state == "running"


def test_an_attempt_its_own_node_no_longer_runs_is_given_up_after_a_while(world, settings):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    world.clock.advance(settings.OPPO_ORPHAN_GRACE_S - 1)
    worker.heartbeat()
    assert Attempt.objects.get().live
    world.clock.advance(2)
    worker.heartbeat(attempts=[(attempt_id, 1)])
    assert Attempt.objects.get().live
    worker.heartbeat()
    run.refresh_from_db()
    assert run.state == "queued"
    assert "no longer runs it" in run.reason
    world.cycle()
    run.refresh_from_db()
    assert run.state == "allocated"


@pytest.mark.parametrize("url", ["file:///etc", "{root}/runs/{run}/../../x", "{root}/runs/{other}/checkpoints/x"])
def test_a_checkpoint_outside_the_runs_folder_is_refused(world, settings, url):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    at = url.format(root=settings.OPPO_ARTIFACT_ROOT, run=run.pk, other=run.pk + 1)
    reply = worker.attempt(attempt_id, "checkpoints", {"epoch": 1, "step": 1, "url": at, "manifest_sha256": "0", "bytes": 1})
    assert (reply.status_code, reply.json()["reason"]) == (409, "unknown_checkpoint")
    assert not Checkpoint.objects.exists()


def test_malformed_bodies_are_refused_with_the_place(world):
    worker = world.worker()
    reply = worker.post("heartbeat", "{", worker.token)
    assert reply.status_code == 422
    reply = worker.post("heartbeat", {"devices": [], "attempts": [], "extra": 1}, worker.token)
    assert reply.json()["errors"][0]["path"] == "extra"
    reply = worker.post("join", {"name": "../x", "hostname": "h", "cpus": 1, "memory_bytes": 1}, world.join_token)
    assert reply.json()["errors"][0]["path"] == "name"
    odd = {"id": "m", "kind": "model", "bytes": 1, "context": -1, "vocab": 2**31, "architecture": "A" * 201}
    reply = worker.post("heartbeat", {"devices": [], "attempts": [], "catalogue": [odd]}, worker.token)
    assert [error["path"] for error in reply.json()["errors"]] == [
        f"catalogue.0.{key}" for key in ("architecture", "context", "vocab")
    ]
    old = {"wire_version": 99, "name": "x", "hostname": "h", "cpus": 1, "memory_bytes": 1}
    assert worker.post("join", old, world.join_token).status_code == 422


def test_refusals_of_the_api_are_final_for_a_worker(world, settings):
    """But for a host's name that it has not been told: that is mended on its side."""
    worker = world.worker()
    _, attempt_id = world.start(worker)

    def deliver(request: httpx.Request) -> httpx.Response:
        headers = {"Authorization": request.headers["Authorization"]}
        told = worker.client.post(request.url.path, request.content, content_type="application/json", headers=headers)
        return httpx.Response(told.status_code, headers=dict(told.headers), content=told.content)

    def speaking_as(token: str) -> PlatformApi:
        api = PlatformApi("http://platform", token)
        api._http = httpx.Client(transport=httpx.MockTransport(deliver), base_url=api._http.base_url, headers=api._http.headers)
        return api

    beat = wire.AttemptHeartbeat(epoch=1)
    own = speaking_as(worker.attempt_tokens[attempt_id])
    with pytest.raises(RefusedError, match=r"^401"):
        speaking_as("nonsense").attempt_heartbeat(attempt_id, beat)
    with pytest.raises(RefusedError, match=r"^404"):
        own.attempt_heartbeat(attempt_id + 1, beat)
    with pytest.raises(RefusedError) as refused:
        own.attempt_heartbeat(attempt_id, wire.AttemptHeartbeat(epoch=7))
    assert refused.value.reason == "stale_epoch"
    with pytest.raises(UnacceptableError, match=r"^422"):
        own.send_events(attempt_id, b"{}")
    with pytest.raises(UnacceptableError, match=r"^413"):
        own.send_events(attempt_id, b" " * (wire.MAX_BATCH_BYTES + 1))
    settings.ALLOWED_HOSTS = ["elsewhere.example.org"]
    with pytest.raises(Unreachable, match=r"^400"):
        own.attempt_heartbeat(attempt_id, beat)


def test_of_two_checkpoints_at_a_step_the_one_told_last_counts(world, settings):
    """A run that stops half-way has one on schedule and one with the half-done step; telling again changes nothing."""
    worker = world.worker()
    run, attempt_id = world.start(worker)
    for name in ("step-00000004", "step-00000004-chunk-000002", "step-00000004-chunk-000002"):
        url = f"{settings.OPPO_ARTIFACT_ROOT}/runs/{run.pk}/checkpoints/{name}"
        told = {"epoch": 1, "step": 4, "url": url, "manifest_sha256": "0", "bytes": 1}
        assert worker.attempt(attempt_id, "checkpoints", told).status_code == 200
    assert [checkpoint.url for checkpoint in Checkpoint.objects.filter(run=run)] == [url]
