"""Cycles against real PostgreSQL and a real broker: allocation, leases, requeue, dispatch."""

import base64
import json

import pytest
import redis
from django.conf import settings as django_settings
from django.db import IntegrityError, connection

from oppo_contract.states import RunState, can_transition
from oppo_platform.cluster.models import Device
from oppo_platform.runs.lifecycle import cancel_run, pause_run, resume_run
from oppo_platform.runs.models import Allocation, Attempt, Run, Transition
from oppo_platform.runs.transitions import allocate_runs
from oppo_platform.scheduling import cycle, waiting_runs
from oppo_platform.scheduling.allocate import allocate
from oppo_platform.scheduling.cycle import Kept, run_cycle
from oppo_platform.scheduling.models import Dispatch

LEASE_S = django_settings.OPPO_LEASE_S


def orders_in(queue: str, url: str) -> list[dict]:
    """Launch orders that lie in a node's queue, taken out."""
    broker, orders = redis.from_url(url), []
    while (message := broker.rpop(queue)) is not None:
        orders.append(json.loads(base64.b64decode(json.loads(message)["body"]))[1])
    return orders


def test_a_cycle_places_what_fits_and_tells_the_rest_why(world, redis_url):
    worker = world.worker()
    first, second = world.submit(), world.submit()
    result = world.cycle()
    assert result.counts() == {"placed": 1, "preempted": 0, "fenced": 0, "waiting": 1, "sent": 1}
    first.refresh_from_db()
    second.refresh_from_db()
    assert (first.state, second.state) == ("allocated", "queued")
    assert second.reason == "Waits for 1 device: the only suitable one is in use."
    attempt = first.attempts.get()
    assert orders_in(worker.joined["queue"], redis_url) == [{"attempt_id": attempt.pk, "epoch": 1}]
    assert worker.heartbeat()["unclaimed"] == [{"attempt_id": attempt.pk, "epoch": 1}]


@pytest.fixture
def as_they_lie(world):
    """PostgreSQL reads whole tables, in the order in which rows lie there, as it may whenever no other order is asked for."""
    ways = ("enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan")
    with connection.cursor() as cursor:
        cursor.execute("; ".join(f"SET {way} = off" for way in ways))
    yield
    with connection.cursor() as cursor:
        cursor.execute("; ".join(f"RESET {way}" for way in ways))


@pytest.mark.usefixtures("as_they_lie")
def test_a_node_is_told_the_oldest_attempt_first(world):
    worker = world.worker("node", devices=3, kind="cuda")
    for _ in range(3):
        world.submit()
    world.cycle()
    attempts = list(Attempt.objects.order_by("pk"))
    for attempt in reversed(attempts):
        attempt.save()  # written anew behind the others
    assert [order["attempt_id"] for order in worker.heartbeat()["unclaimed"]] == [attempt.pk for attempt in attempts]


def test_a_device_cannot_be_allocated_twice(world):
    world.worker()
    run = world.submit()
    world.cycle()
    attempt, device = run.attempts.get(), Device.objects.get()
    with pytest.raises(IntegrityError):
        Allocation.objects.create(attempt=attempt, device=device, created_at=world.clock.now())


def test_schedulers_at_once_give_nothing_away_twice(world, at_once):
    for number in range(3):
        world.worker(f"node{number}", devices=2, kind="cuda")
    runs = [world.submit() for _ in range(8)]
    results = at_once(*[world.cycle] * 4)
    assert all(result is None or hasattr(result, "placed") for result in results), results
    world.cycle()
    assert Allocation.objects.filter(released_at__isnull=True).count() == 6
    assert Attempt.objects.count() == 6
    assert Run.objects.filter(state="allocated").count() == 6
    assert [run.pk for run in runs[6:]] == list(Run.objects.filter(state="queued").order_by("pk").values_list("pk", flat=True))


def test_placements_that_conflict_leave_the_others_alone(world, redis_url, monkeypatch):
    """A device that is held already, and a run that was cancelled, between a plan and its allocation."""
    worker = world.worker(devices=4, kind="cuda")
    earlier = world.submit()
    world.cycle()
    held, cancelled, fine = (world.submit() for _ in range(3))

    def late(placements, now):
        place = {placement.run_id: placement for placement in placements}
        Allocation.objects.create(attempt=earlier.attempts.get(), device_id=place[held.pk].device_ids[0], created_at=now)
        cancel_run(cancelled.pk, "user:ada")
        return allocate(placements, now)

    orders_in(worker.joined["queue"], redis_url)
    monkeypatch.setattr(cycle, "allocate", late)
    result = world.cycle()
    assert (result.placed, result.sent) == (1, 1)
    found = Run.objects.filter(pk__in=[held.pk, cancelled.pk, fine.pk]).order_by("pk").values_list("state", "epochs")
    assert list(found) == [("queued", 0), ("cancelled", 0), ("allocated", 1)]
    assert [order["attempt_id"] for order in orders_in(worker.joined["queue"], redis_url)] == [fine.attempts.get().pk]
    moves = Transition.objects.filter(run=fine).order_by("pk").values_list("old", "new", "reason", "actor")
    assert list(moves)[1:] == [("queued", "allocated", "Allocated on node node1.", "scheduler")]
    assert not Transition.objects.filter(run=held, new="allocated").exists()


@pytest.mark.parametrize("first", ["cancel", "allocate"])
def test_a_run_is_cancelled_or_allocated_not_both(world, at_once, first):
    runs = [world.submit() for _ in range(3)]
    ids = [run.pk for run in runs]
    calls = [lambda: cancel_run(ids[1], "user:ada"), lambda: allocate_runs(dict.fromkeys(ids, "Allocated."))]
    at_once(*(calls if first == "cancel" else reversed(calls)))
    rows = list(Run.objects.filter(pk__in=ids).order_by("pk").values_list("state", "epochs"))
    assert (rows[0], rows[2]) == (("allocated", 1), ("allocated", 1))
    assert rows[1] in (("cancelled", 0), ("cancelled", 1), ("cancelling", 1)), rows
    moves = [(t.old, t.new) for t in Transition.objects.filter(run=ids[1]).order_by("pk")][1:]
    assert all(can_transition(RunState(old), RunState(new)) for old, new in moves)
    assert moves[0] == (("queued", "allocated") if rows[1][1] else ("queued", "cancelled"))


def test_a_run_goes_only_where_its_prompts_are(world, make_entry):
    world.worker("empty", catalogue=[])
    run = world.submit()
    world.cycle()
    run.refresh_from_db()
    assert (run.state, run.reason) == ("queued", "No connected worker has the prompts letters.")
    world.worker("full")
    world.cycle()
    assert run.attempts.get().node.name == "full"


def test_a_silent_node_gets_nothing(world):
    world.worker()
    world.clock.advance(3600)
    run = world.submit()
    world.cycle()
    run.refresh_from_db()
    assert (run.state, run.reason) == ("queued", "No worker is connected.")


def cycles_over(world, seconds, worker=None, **report):
    """Let time pass with the scheduler at work, so that no downtime is credited."""
    for _ in range(int(seconds / 5) + 1):
        world.clock.advance(5)
        if worker is not None:
            worker.heartbeat(**report)
        world.cycle()


def test_when_the_lease_runs_out_the_run_resumes_elsewhere_from_its_checkpoint(world, settings):
    settings.OPPO_LEASE_S = 30
    settings.OPPO_ARTIFACTS_SHARED = True
    worker = world.worker("node1")
    run, attempt_id = world.start(worker)
    url = f"{django_settings.OPPO_ARTIFACT_ROOT}/runs/{run.pk}/checkpoints/step-00000040"
    told = {"epoch": 1, "step": 40, "url": url, "manifest_sha256": "0" * 64, "bytes": 9}
    assert worker.attempt(attempt_id, "checkpoints", told).status_code == 200
    cycles_over(world, 30)
    run.refresh_from_db()
    assert run.state == "queued"
    assert Attempt.objects.get(pk=attempt_id).state == "fenced"
    assert "until the lease expired. Resumes from step 40." in run.transitions.last().reason

    other = world.worker("node2")
    world.cycle()
    second = run.attempts.get(epoch=2)
    claimed = other.claim(second.pk, epoch=2).json()
    assert claimed["resume_from"] == {"step": 40, "url": url, "manifest_sha256": "0" * 64}
    assert second.start_step == 40
    # The old supervisor wakes up: it is told to stop, and may change nothing.
    reply = worker.attempt(attempt_id, "heartbeat", {"epoch": 1, "running": True})
    assert (reply.status_code, reply.json()["reason"]) == (409, "lease_lost")
    late = worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": "failed", "reason": "late"})
    assert late.status_code == 409
    run.refresh_from_db()
    assert run.state == "starting"


def test_a_fenced_attempts_device_is_given_away_only_when_reported_empty(world, settings):
    settings.OPPO_LEASE_S = 30
    worker = world.worker()
    run, attempt_id = world.start(worker)
    cycles_over(world, 30, worker, attempts=[(attempt_id, 1)])
    orders = worker.heartbeat(attempts=[(attempt_id, 1)])
    assert orders["stop"] == [{"attempt_id": attempt_id, "epoch": 1}]
    world.cycle()
    run.refresh_from_db()
    assert (run.state, Device.objects.get().state) == ("queued", "unknown")
    worker.heartbeat()
    world.cycle()
    run.refresh_from_db()
    assert (run.state, Device.objects.get().state) == ("allocated", "ready")


def test_a_device_that_was_out_of_sight_when_its_attempt_was_fenced_is_not_ready_when_it_is_back(world, settings):
    settings.OPPO_LEASE_S = 30
    worker = world.worker(devices=2, kind="cuda")
    _, attempt_id = world.start(worker)
    held = Device.objects.get(allocations__attempt=attempt_id)
    assert held.index == 0
    cycles_over(world, 30, worker, devices=0, attempts=[(attempt_id, 1)])
    worker.heartbeat(devices=2, kind="cuda", attempts=[(attempt_id, 1)])
    held.refresh_from_db()
    assert held.state == "unknown"
    worker.heartbeat(devices=2, kind="cuda")
    held.refresh_from_db()
    assert held.state == "ready"


def test_a_run_whose_engine_dies_again_and_again_fails(world):
    worker = world.worker()
    run = world.submit()
    for epoch in (1, 2, 3):
        world.clock.advance(30)
        worker.heartbeat()
        world.cycle()
        attempt = run.attempts.get(epoch=epoch)
        worker.claim(attempt.pk, epoch)
        told = {"epoch": epoch, "outcome": "engine_died", "exit_code": -9, "reason": "killed", "last_log_lines": ["boom"]}
        assert worker.attempt(attempt.pk, "outcome", told).status_code == 200
        run.refresh_from_db()
        assert run.state == ("queued" if epoch < 3 else "failed")
    assert run.error == "The engine died (exit status -9): killed. No attempts left (3 of 3)."
    assert run.last_log_lines == ["boom"]
    assert not Allocation.objects.filter(released_at__isnull=True).exists()


def test_downtime_of_the_scheduler_is_credited(world, settings):
    settings.OPPO_LEASE_S = 60
    worker = world.worker()
    run, attempt_id = world.start(worker)
    world.cycle()
    world.clock.advance(600)
    world.cycle()
    run.refresh_from_db()
    assert run.state == "running"
    assert worker.attempt(attempt_id, "heartbeat", {"epoch": 1, "running": True}).status_code == 200
    cycles_over(world, 60)
    run.refresh_from_db()
    assert run.state == "queued"


def test_unclaimed_orders_are_sent_again(world, redis_url):
    worker = world.worker()
    world.submit()
    world.cycle()
    assert len(orders_in(worker.joined["queue"], redis_url)) == 1
    world.cycle()
    assert orders_in(worker.joined["queue"], redis_url) == []
    world.clock.advance(django_settings.OPPO_REDISPATCH_S + 1)
    world.cycle()
    assert len(orders_in(worker.joined["queue"], redis_url)) == 1
    assert Dispatch.objects.get().sends == 2


def test_unclaimed_launch_of_an_unreachable_node_is_allocated_elsewhere(world):
    silent = world.worker("node1")
    run = world.submit()
    world.cycle()
    world.clock.advance(django_settings.OPPO_NODE_FRESH_S + 1)
    world.worker("node2")
    world.cycle()
    assert [attempt.node.name for attempt in run.attempts.order_by("epoch")] == ["node1", "node2"]
    assert silent.claim(run.attempts.get(epoch=1).pk).json()["reason"] == "lease_lost"
    assert run.transitions.filter(
        reason="Node node1 stopped sending heartbeats before the run started. No progress was lost."
    ).exists()


def test_without_a_broker_heartbeats_carry_the_orders(world, settings):
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    worker = world.worker()
    run = world.submit()
    assert world.cycle().sent == 0
    assert worker.heartbeat()["unclaimed"] == [{"attempt_id": run.attempts.get().pk, "epoch": 1}]


def test_without_shared_storage_a_run_waits_for_the_node_of_its_checkpoint(world):
    worker = world.worker("node1")
    run, attempt_id = world.start(worker)
    url = f"{django_settings.OPPO_ARTIFACT_ROOT}/runs/{run.pk}/checkpoints/step-00000005"
    worker.attempt(attempt_id, "checkpoints", {"epoch": 1, "step": 5, "url": url, "manifest_sha256": "0", "bytes": 1})
    worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": "engine_died", "reason": "killed"})
    world.clock.advance(120)
    world.worker("node2")
    world.cycle()
    run.refresh_from_db()
    assert run.reason == "Its checkpoint is on node node1, which is not connected; storage is not shared."
    worker.heartbeat()
    world.cycle()
    assert run.attempts.get(epoch=2).node.name == "node1"


def test_a_cancelled_waiting_run_is_never_placed(world):
    world.worker()
    run = world.submit()
    cancel_run(run.pk, "user:ada")
    assert world.cycle().placed == 0


def test_a_run_paused_and_resumed_between_two_cycles_shows_its_reason_again(world):
    world.worker()
    _, run = world.submit(), world.submit()
    kept = Kept()
    run_cycle(kept)
    pause_run(run.pk, "user:ada")
    resume_run(run.pk, "user:ada")
    run.refresh_from_db()
    assert (run.state, run.reason) == ("queued", "Resumed by ada.")
    run_cycle(kept)
    run.refresh_from_db()
    assert run.reason == "Waits for 1 device: the only suitable one is in use."


def test_a_cycle_reads_changed_waiting_runs_only(world, monkeypatch):
    """Also where a run changes twice in one transaction, as all of a test does."""
    world.worker()
    runs = [world.submit() for _ in range(4)]
    kept, read = Kept(), []
    rows_of = waiting_runs._read
    monkeypatch.setattr(waiting_runs, "_read", lambda run_ids: read.append(sorted(run_ids)) or rows_of(run_ids))
    run_cycle(kept)
    started, *waiting = [run.pk for run in runs]
    assert read == [[started, *waiting]]
    run_cycle(kept)  # their reasons were written, which is another version of their rows
    run_cycle(kept)
    assert read[1:] == [waiting]
    for priority in (60, 70):
        Run.objects.filter(pk=waiting[1]).update(priority=priority)
        run_cycle(kept)
        assert kept.waiting.read()[waiting[1]].priority == priority
    assert {tuple(ids) for ids in read[2:]} == {(waiting[1],)}, "the others are kept"
