"""An attempt on several nodes: one launch a node, a rendezvous, and one end for all, in both orders of every race."""

import pytest

from oppo_platform.cluster.models import Node
from oppo_platform.runs.lifecycle import cancel_run, pause_run
from oppo_platform.runs.models import Run
from oppo_platform.scheduling import dispatch
from oppo_platform.scheduling.cycle import run_cycle
from oppo_platform.telemetry.models import LogLine, ProducerMark
from tests.web.runs.two_node_run import ADDRESS, TWO


def test_the_others_are_ordered_when_the_first_node_is_there(pair):
    assert pair.attempt.nodes == 2
    assert pair.states() == ("allocated", "allocated", "allocated")
    assert pair.run.reason == f"Allocated on nodes {pair.head.name}, {pair.other.name}."
    assert pair.head.heartbeat()["unclaimed"] == [{"attempt_id": pair.attempt.pk, "epoch": 1}]
    assert pair.other.heartbeat()["unclaimed"] == []
    assert pair.claim(pair.other).json()["reason"] == "not_your_node"
    told = pair.claim(pair.head).json()
    assert told["rendezvous"] == {"nodes": 2, "node_rank": 0, "address": ADDRESS, "deadline_s": 20.0}
    assert pair.other.heartbeat()["unclaimed"] == [{"attempt_id": pair.attempt.pk, "epoch": 1}]
    pair.world.clock.advance(5)
    told = pair.claim(pair.other).json()
    assert told["rendezvous"] == {"nodes": 2, "node_rank": 1, "address": ADDRESS, "deadline_s": 15.0}
    assert told["device_indices"] == [0]
    assert pair.other.heartbeat(attempts=[(pair.attempt.pk, 1)]) == {
        "unclaimed": [], "stop": [], "catalogue_wanted": False, "delete": [],
    }  # fmt: skip


def test_orders_go_over_the_broker_at_their_time_and_once(pair, monkeypatch):
    sent = []

    class Broker:
        def send_task(self, name, kwargs, queue, **_):
            sent.append(queue)

    monkeypatch.setattr(dispatch, "broker", lambda url: Broker())
    pair.world.cycle()
    assert sent == []  # the first node's went out when it was allocated
    pair.claim(pair.head)
    pair.world.cycle()
    pair.world.cycle()
    assert sent == [f"oppo.node.{pair.other.name}"]


def test_a_launch_is_claimed_once_whoever_asks_and_however_often(pair, at_once):
    pair.claim(pair.head)
    replies = at_once(*[lambda: pair.claim(pair.other)] * 4)
    assert sorted(reply.status_code for reply in replies) == [200, 409, 409, 409]
    third = pair.world.worker("c")
    assert pair.claim(third).json()["reason"] == "not_your_node"
    assert pair.claim(pair.other, epoch=2).json()["reason"] == "stale_epoch"


def test_two_schedulers_make_one_attempt_with_one_launch_a_node(world, settings, at_once):
    settings.OPPO_ARTIFACTS_SHARED = True
    for name in ("a", "b"):
        world.worker(name)
    run = world.submit(resources=TWO)
    at_once(run_cycle, run_cycle)
    assert [(a.epoch, a.nodes, a.launches.count()) for a in run.attempts.all()] == [(1, 2, 1)]


def test_each_node_speaks_for_itself_alone(pair, events):
    pair.claim_both()
    assert pair.beat(pair.other).json()["lease_s"] == 40
    assert pair.states() == ("starting", "claimed", "claimed")  # the first node says when it runs
    assert pair.beat(pair.head).status_code == 200
    assert pair.states()[0] == "running"
    assert pair.run.reason == f"Trains on nodes {pair.head.name}, {pair.other.name}."
    log = {"kind": "log", "producer": "engine", "seq": 1, "time": 1.0, "stream": "stderr", "lines": ["here"]}
    assert pair.head.send_events(pair.attempt.pk, [events.started(1)]).status_code == 200
    assert pair.other.send_events(pair.attempt.pk, [log, events.step(2, 7)]).json()["high_water"] == 2
    assert list(LogLine.objects.values_list("text", flat=True)) == ["[node 1] here"]
    assert Run.objects.get(pk=pair.run.pk).step == 0
    assert set(ProducerMark.objects.values_list("producer", "high_water")) == {("engine", 1), ("engine/1", 2)}
    told = {"epoch": 1, "step": 1, "url": "file:///x", "manifest_sha256": "0", "bytes": 1}
    assert pair.other.attempt(pair.attempt.pk, "checkpoints", told).status_code == 409


@pytest.mark.parametrize("first", ["head", "other"])
def test_success_is_the_first_nodes_to_tell_in_whatever_order(pair, first):
    pair.train()
    order = [pair.head, pair.other] if first == "head" else [pair.other, pair.head]
    replies = [pair.report(worker, "succeeded", 0).status_code for worker in order]
    assert replies == ([200, 409] if first == "head" else [200, 200])
    assert pair.states() == ("succeeded", "ended", "ended")
    assert pair.held() == []
    assert pair.device(pair.head) == "ready"
    assert pair.device(pair.other) == ("unknown" if first == "head" else "ready")
    pair.other.heartbeat()
    assert pair.device(pair.other) == "ready"


def test_a_node_that_is_done_frees_its_devices_while_the_first_one_saves(pair):
    pair.train()
    assert pair.report(pair.other, "succeeded", 0).status_code == 200
    assert pair.report(pair.other, "succeeded", 0).status_code == 200  # told again
    assert pair.states() == ("running", "running", "ended")
    assert pair.held() == [pair.head.name]
    assert pair.beat(pair.other).json()["reason"] == "ended"


@pytest.mark.parametrize("who", ["head", "other"])
def test_the_first_failure_ends_all_and_moves_the_run_once(pair, who):
    pair.train()
    failed, left = (pair.head, pair.other) if who == "head" else (pair.other, pair.head)
    assert pair.report(failed, last_log_lines=["killed"]).status_code == 200
    assert pair.states() == ("queued", "ended", "ended")
    assert pair.run.transitions.filter(new="queued", old="running").count() == 1
    assert ("on node " + failed.name in pair.run.reason) == (who == "other")
    assert (pair.device(failed), pair.device(left)) == ("ready", "unknown")
    refused = pair.beat(left)
    assert (refused.status_code, refused.json()["reason"]) == (409, "ended")
    stop = [{"attempt_id": pair.attempt.pk, "epoch": 1}]
    assert left.heartbeat(attempts=[(pair.attempt.pk, 1)])["stop"] == stop
    assert pair.device(left) == "unknown"  # its engine is still there
    assert pair.report(left).status_code in (200, 409)  # what it says has been said, or comes too late
    assert pair.states() == ("queued", "ended", "ended")
    left.heartbeat()
    assert pair.device(left) == "ready"
    pair.world.cycle()
    second = pair.run.attempts.get(epoch=2)
    assert (second.nodes, second.launches.count()) == (2, 1)


def test_two_failures_at_once_count_as_one_death(pair, at_once):
    pair.train()
    at_once(lambda: pair.report(pair.head), lambda: pair.report(pair.other))
    assert pair.states() == ("queued", "ended", "ended")
    assert pair.run.transitions.filter(new="queued", old="running").count() == 1


def test_a_rule_excludes_the_node_that_failed(pair):
    pair.train()
    pair.report(pair.other, last_log_lines=["uncorrectable ECC error"])
    pair.run.refresh_from_db()
    assert pair.run.excluded_nodes == [Node.objects.get(name=pair.other.name).pk]
    pair.head.heartbeat()
    pair.world.cycle()
    pair.run.refresh_from_db()
    assert pair.run.reason == f"Needs 2 nodes; its retry rules exclude {pair.other.name}, and too few other nodes are suitable."


def test_absent_node_is_named_and_the_run_keeps_its_place(pair):
    place = pair.run.queued_at
    pair.claim(pair.head)
    pair.world.clock.advance(21)
    assert pair.claim(pair.other).json()["reason"] == "ended"  # late, and before the scheduler has noticed
    pair.world.cycle()
    pair.attempt.refresh_from_db()
    assert (pair.attempt.state, pair.attempt.outcome) == ("fenced", "absent")
    assert pair.attempt.reason == f"Node {pair.other.name} did not join the other nodes within 20 s"
    assert pair.claim(pair.other).json()["reason"] == "lease_lost"  # late, and after
    assert Run.objects.get(pk=pair.run.pk).queued_at == place
    assert (pair.device(pair.head), pair.device(pair.other)) == ("unknown", "ready")
    assert pair.beat(pair.head).status_code == 409


def test_node_that_claims_in_time_is_not_absent(pair):
    pair.claim(pair.head)
    pair.world.clock.advance(19)
    assert pair.claim(pair.other).status_code == 200
    pair.world.clock.advance(2)
    pair.world.cycle()
    assert pair.states() == ("starting", "claimed", "claimed")


def test_time_in_which_no_scheduler_ran_is_not_held_against_the_one_that_is_awaited(pair, settings):
    settings.OPPO_DOWNTIME_S = 5
    pair.claim(pair.head)
    pair.world.clock.advance(30)
    pair.world.cycle()
    assert pair.states() == ("starting", "claimed", "allocated")
    assert pair.claim(pair.other).status_code == 200


@pytest.mark.parametrize("head_has_claimed", [False, True])
def test_a_node_that_falls_silent_before_it_claims_is_not_waited_for(pair, settings, head_has_claimed):
    if head_has_claimed:
        pair.claim(pair.head)
    settings.OPPO_NODE_FRESH_S = 5
    pair.world.clock.advance(6)
    pair.head.heartbeat(attempts=[(pair.attempt.pk, 1)] if head_has_claimed else [])
    pair.world.cycle()
    pair.attempt.refresh_from_db()
    assert pair.attempt.outcome == ("absent" if head_has_claimed else "unclaimed")
    assert f"Node {pair.other.name} stopped sending heartbeats before" in pair.attempt.reason
    assert Run.objects.get(pk=pair.run.pk).state == "queued"


def test_the_head_dies_before_the_others_claim(pair):
    pair.claim(pair.head)
    pair.report(pair.head)
    assert pair.states() == ("queued", "ended", "ended")
    assert pair.claim(pair.other).json()["reason"] == "ended"
    assert pair.other.heartbeat()["unclaimed"] == []
    assert (pair.device(pair.head), pair.device(pair.other)) == ("ready", "ready")


@pytest.mark.parametrize("silent", ["head", "other"])
def test_one_lease_that_runs_out_fences_all(pair, silent):
    pair.train()
    quiet, alive = (pair.head, pair.other) if silent == "head" else (pair.other, pair.head)
    for _ in range(3):
        pair.world.clock.advance(15)
        last = pair.beat(alive)
    assert last.status_code == 200
    pair.world.cycle()
    pair.attempt.refresh_from_db()
    assert (pair.attempt.state, pair.attempt.outcome) == ("fenced", "lease_lost")
    assert pair.attempt.reason == f"The worker on node {quiet.name} sent no heartbeat until the lease expired"
    assert (pair.device(pair.head), pair.device(pair.other)) == ("unknown", "unknown")
    assert pair.beat(alive).status_code == pair.beat(quiet).status_code == 409
    assert pair.states() == ("queued", "fenced", "ended")


@pytest.mark.parametrize("lost", ["head", "other"])
def test_a_supervisor_that_its_agent_no_longer_runs_ends_all(pair, settings, lost):
    settings.OPPO_ORPHAN_GRACE_S = 3
    pair.train()
    gone, alive = (pair.head, pair.other) if lost == "head" else (pair.other, pair.head)
    pair.world.clock.advance(4)
    alive.heartbeat(attempts=[(pair.attempt.pk, 1)])
    assert pair.states()[0] == "running"
    gone.heartbeat()
    assert pair.states() == ("queued", "fenced", "ended")
    assert (pair.device(gone), pair.device(alive)) == ("ready", "unknown")


@pytest.mark.parametrize(("wish", "signal", "word"), [(cancel_run, "cancel", "cancelled"), (pause_run, "pause", "paused")])
def test_a_wish_reaches_every_node_and_the_head_says_how_it_ended(pair, wish, signal, word):
    pair.train()
    wish(pair.run.pk, "user:ada")
    assert pair.beat(pair.head).json()["signal"] == pair.beat(pair.other).json()["signal"] == signal
    assert pair.report(pair.other, word, 0).status_code == 200
    assert pair.states()[1:] == ("running", "ended")
    assert pair.report(pair.head, word, 0).status_code == 200
    assert pair.states()[0] == word


def test_a_wish_while_others_are_awaited_lets_nobody_in_any_more(pair):
    pair.claim(pair.head)
    pause_run(pair.run.pk, "user:ada")
    assert pair.claim(pair.other).json()["reason"] == "ended"
    assert pair.other.heartbeat()["unclaimed"] == []
    pair.report(pair.head, "paused", 1)
    assert pair.states() == ("paused", "ended", "ended")


def test_a_wish_before_anybody_claimed_frees_all_at_once(pair):
    cancel_run(pair.run.pk, "user:ada")
    assert pair.states() == ("cancelled", "ended", "ended")
    assert pair.held() == []
    assert (pair.device(pair.head), pair.device(pair.other)) == ("ready", "ready")


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_a_failure_against_a_cancel(pair, cancelled_first):
    pair.train()
    acts = [lambda: cancel_run(pair.run.pk, "user:ada"), lambda: pair.report(pair.other)]
    for act in acts if cancelled_first else acts[::-1]:
        act()
    assert pair.states() == ("cancelled", "ended", "ended")
    assert pair.held() == []


def test_a_node_that_is_killed_at_a_deadline_ends_all_by_the_wish(pair):
    pair.train()
    pause_run(pair.run.pk, "user:ada")
    pair.report(pair.other, "paused", 137)
    assert pair.states() == ("paused", "ended", "ended")


def test_pages_tell_on_which_nodes_a_run_is(pair):
    ada, names = pair.world.login("ada"), [pair.head.name, pair.other.name]
    second = pair.world.submit(resources=TWO)
    pair.world.cycle()
    told = {item["id"]: (item["nodes"], item["where"]) for item in ada.get("/api/v1/runs").json()["items"]}
    assert told == {pair.run.pk: (2, names), second.pk: (2, [])}
    page = " ".join(ada.get("/queue").content.decode().split())
    assert f"on {', '.join(names)}</span>" in page
    assert '2 devices<span class="sub">on 2 nodes</span>' in page
    assert page.count("<small>2 nodes</small>") == 2  # one block a node
    pair.train()
    pair.report(pair.head, "succeeded", 0)
    assert ada.get(f"/api/v1/runs/{pair.run.pk}").json()["where"] == names
