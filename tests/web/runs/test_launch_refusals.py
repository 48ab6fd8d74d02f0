"""What launches refuse: stale writes, other tokens, older workers, bad addresses, and what no cluster could hold."""

import pytest
from django.db import IntegrityError, connection, transaction

from oppo_contract import wire
from oppo_platform.cluster.models import Node
from oppo_platform.runs.models import Attempt, AttemptState, Launch, LaunchState
from tests.web.runs.two_node_run import TWO


def test_the_database_itself_refuses_what_is_stale(pair):
    pair.train()
    head, other = (Node.objects.get(name=worker.name).pk for worker in (pair.head, pair.other))
    launch = f"attempt_id = {pair.attempt.pk} AND rank = 1"
    columns = "INSERT INTO runs_launch (attempt_id, node_id, rank, state, token_prefix, token_digest, outcome, reason) VALUES "

    def refused(statement):
        with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(statement)

    refused(f"{columns} ({pair.attempt.pk}, {head}, 1, 'allocated', '', '', '', '')")
    refused(f"{columns} ({pair.attempt.pk}, {other}, 2, 'allocated', '', '', '', '')")
    refused(f"UPDATE runs_launch SET rank = 0 WHERE {launch}")
    refused(f"UPDATE runs_launch SET node_id = {head} WHERE {launch}")
    pair.report(pair.head)
    assert pair.states() == ("queued", "ended", "ended")
    refused(f"UPDATE runs_launch SET state = 'claimed' WHERE {launch}")
    refused(f"UPDATE runs_launch SET lease_expires_at = now() WHERE {launch}")
    refused(f"UPDATE runs_launch SET outcome = 'succeeded' WHERE {launch}")


def test_a_token_of_one_node_is_no_token_of_another_attempt(pair):
    pair.train()
    elsewhere = pair.attempt.pk + 1
    pair.other.attempt_tokens[elsewhere] = pair.other.attempt_tokens[pair.attempt.pk]
    assert pair.other.attempt(elsewhere, "heartbeat", {"epoch": 1}).status_code == 404
    pair.other.attempt_tokens[pair.attempt.pk] += "x"
    assert pair.beat(pair.other).status_code == 401


TOO_OLD = wire.SUPPORTED_VERSIONS[0] - 1


def test_every_version_that_is_spoken_can_take_part_in_a_run_on_several_nodes():
    assert all(
        wire.ADDED_IN_VERSION[field] <= wire.SUPPORTED_VERSIONS[0] for field in (("Claim", "address"), ("Claimed", "rendezvous"))
    )


def test_a_worker_that_is_too_old_gets_no_part_in_it(world, settings):
    settings.OPPO_ARTIFACTS_SHARED = True
    world.worker("a")
    world.worker("b")
    Node.objects.filter(name="b").update(wire_version=TOO_OLD)
    run = world.submit(resources=TWO)
    alone = world.submit()
    world.cycle()
    run.refresh_from_db()
    alone.refresh_from_db()
    assert run.reason == "Needs 2 nodes with 1 device each; 1 connected node is suitable."
    assert (alone.state, alone.attempts.get().node.name) == ("allocated", "a")


@pytest.mark.parametrize("who", ["head", "other"])
def test_a_worker_that_is_put_back_to_an_older_version_is_not_waited_for(pair, who):
    worker = pair.head if who == "head" else pair.other
    report = [{"index": 0, "kind": "cpu", "model": "m", "memory_bytes": 1}]
    told = {"wire_version": TOO_OLD, "devices": report, "attempts": [], "catalogue": None}
    assert worker.post("heartbeat", told, worker.token).json()["unclaimed"] == []
    pair.world.cycle()
    assert pair.states()[1:] == ("fenced", "ended")


def test_a_first_node_without_an_address_is_refused(pair):
    assert pair.head.claim(pair.attempt.pk).json()["reason"] == "not_your_node"
    assert pair.states() == ("allocated", "allocated", "allocated")


@pytest.mark.parametrize("host", ["-x", "a b", "--master-port", "", "a;b", "x" * 300])
def test_an_address_is_a_name_or_a_number(pair, host):
    assert pair.claim(pair.head, address={"host": host, "port": 1}).status_code == 422


def test_infeasible_number_of_nodes_is_refused_at_submit(world, settings, make_spec):
    world.worker("a")
    browser = world.login("ada")

    def complaints(**changes):
        body = {"spec": make_spec(**changes), "project": world.project.pk}
        reply = browser.post("/api/v1/runs/validate", body, content_type="application/json").json()
        return [(p["path"], p["message"], p["allowed"]) for p in reply["problems"]]

    settings.OPPO_ARTIFACTS_SHARED = False
    [(path, message, _)] = complaints(resources=TWO)
    assert path == "resources.nodes"
    assert message.startswith("needs storage shared by all nodes")
    settings.OPPO_ARTIFACTS_SHARED = True
    said = "exceeds the number of connected workers with 1 device each"
    assert complaints(resources=TWO) == [("resources.nodes", said, "at most 1")]
    world.worker("b")
    assert complaints(resources=TWO) == []


def test_at_most_one_live_attempt_and_its_launches_hold_devices(pair):
    pair.train()
    assert pair.held() == ["a", "b"]
    assert Attempt.objects.filter(state=AttemptState.RUNNING).count() == 1
    assert Launch.objects.filter(state=LaunchState.CLAIMED).count() == 1
