"""A stale epoch writes nothing: the database itself refuses, also when every check of the services is taken away."""

import threading

import pytest
from django.db import IntegrityError, connection, transaction

from oppo_platform.cluster.models import Device, DeviceState, Node
from oppo_platform.runs import attempts
from oppo_platform.runs.models import Allocation, Attempt, AttemptState, Checkpoint, Run, Transition
from tests.web.locks import wait_for_lock


def fenced(world):
    """A run whose first attempt was fenced while it ran: (run, worker, attempt id)."""
    worker = world.worker()
    run, attempt_id = world.start(worker)
    with transaction.atomic():
        attempts.fence(attempt_id, "lease_lost", "Silent", "scheduler", DeviceState.READY)
    return run, worker, attempt_id


def overtaken(world):
    """The same, and a second attempt trains."""
    run, worker, attempt_id = fenced(world)
    old_token = worker.attempt_tokens[attempt_id]
    world.cycle()
    second = run.attempts.get(epoch=2)
    assert worker.claim(second.pk, 2).status_code == 200
    assert worker.attempt(second.pk, "heartbeat", {"epoch": 2, "running": True}).status_code == 200
    worker.attempt_tokens[attempt_id] = old_token
    return run, worker, attempt_id


def checkpoint_of(run, settings, epoch=1, step=45):
    url = f"{settings.OPPO_ARTIFACT_ROOT}/runs/{run.pk}/checkpoints/step-{step:08d}"
    return {"epoch": epoch, "step": step, "url": url, "manifest_sha256": "0", "bytes": 1}


def state_of(run):
    run.refresh_from_db()
    live = Attempt.objects.filter(run=run, state=AttemptState.RUNNING).values_list("epoch", "lease_expires_at", "seen_at")
    held = Allocation.objects.filter(released_at__isnull=True).values_list("attempt__epoch", flat=True)
    return run.state, run.cursor, list(live), list(held), Checkpoint.objects.count(), Transition.objects.count()


CALLS = {
    "heartbeat": {"epoch": 1, "running": True},
    "outcome": {"epoch": 1, "outcome": "succeeded", "reason": "late"},
    "checkpoints": None,
}


@pytest.mark.parametrize("call", [*CALLS, "claim"])
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_an_overtaken_attempt_changes_nothing_with_or_without_the_services_checks(world, settings, monkeypatch, call, checked):
    run, worker, attempt_id = overtaken(world)
    before = state_of(run)
    world.clock.advance(1)
    if not checked:
        monkeypatch.setattr(attempts, "_refuse_ended", lambda attempt: None)
        monkeypatch.setattr(attempts, "_refuse_epoch", lambda attempt, epoch: None)
        monkeypatch.setattr(attempts, "LIVE_ATTEMPT", tuple(AttemptState))  # the compare-and-set lets everything pass as well
    if call == "claim":
        reply = worker.post(f"attempts/{attempt_id}/claim", {"epoch": 1}, worker.token)
    else:
        reply = worker.attempt(attempt_id, call, CALLS[call] or checkpoint_of(run, settings))
    assert reply.status_code == 409, reply.content
    assert reply.json()["reason"] in ("lease_lost", "stale_epoch", "already_claimed")
    assert state_of(run) == before


def test_the_compare_and_set_alone_refuses_as_well(world):
    _, _, attempt_id = overtaken(world)
    stale = Attempt.objects.get(pk=attempt_id)
    with pytest.raises(attempts.AttemptRefused), transaction.atomic():
        attempts.end_attempt(stale, AttemptState.ENDED, "succeeded", "late")
    live = Attempt.objects.get(run=stale.run, epoch=2)
    with pytest.raises(attempts.AttemptRefused), transaction.atomic():
        attempts._write(live, 1, seen_at=world.clock.now())


def test_bare_sql_is_refused_too(world):
    run, _, attempt_id = overtaken(world)
    device_id = Allocation.objects.get(released_at__isnull=True).device_id
    for statement in (
        f"UPDATE runs_attempt SET lease_expires_at = lease_expires_at + interval '1 hour' WHERE id = {attempt_id}",
        f"UPDATE runs_attempt SET state = 'running' WHERE id = {attempt_id}",
        f"UPDATE runs_attempt SET epoch = 9 WHERE run_id = {run.pk} AND epoch = 2",
        f"UPDATE scheduling_allocation SET released_at = NULL WHERE attempt_id = {attempt_id}",
        f"UPDATE scheduling_allocation SET attempt_id = {attempt_id} WHERE released_at IS NULL",
        f"INSERT INTO scheduling_allocation (attempt_id, device_id, created_at, released_at, settled)"
        f" SELECT {attempt_id}, {device_id}, created_at, created_at, false FROM scheduling_allocation LIMIT 1",
        "UPDATE runs_transition SET reason = 'nicer'",
    ):
        with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(statement)


def test_telemetry_of_a_fenced_attempt_is_still_taken(world, events):
    _, worker, attempt_id = overtaken(world)
    assert worker.send_events(attempt_id, [events.started(1), events.step(2, 1, m=1.0)]).status_code == 200
    assert Attempt.objects.get(pk=attempt_id).first_step == 1


def test_checkpoint_of_a_fenced_attempt_is_accepted_until_the_next_attempt(world, settings):
    run, worker, attempt_id = fenced(world)
    assert worker.attempt(attempt_id, "checkpoints", checkpoint_of(run, settings)).status_code == 200
    world.cycle()
    second = run.attempts.get(epoch=2)
    assert second.start_step == 45
    late = worker.attempt(attempt_id, "checkpoints", checkpoint_of(run, settings, step=50))
    assert late.status_code == 409
    assert Run.objects.get(pk=run.pk).state == "allocated"
    assert [c.step for c in Checkpoint.objects.all()] == [45]


def test_a_report_that_meets_a_fence_half_written_does_not_free_the_devices(world):
    """The engine is still there: the reply asks to stop it, and until it is gone nobody gets its device."""
    worker = world.worker()
    _, attempt_id = world.start(worker)
    told = []
    agent = threading.Thread(target=lambda: (told.append(worker.heartbeat(attempts=[(attempt_id, 1)])), connection.close()))
    with transaction.atomic():
        attempts.fence(attempt_id, "lease_lost", "Silent", "scheduler", DeviceState.UNKNOWN)
        agent.start()
        wait_for_lock()
        with connection.cursor() as cursor:  # as the cycle does for the next attempt on that node: neither waits for the other
            cursor.execute(f"SELECT 1 FROM {Node._meta.db_table} FOR KEY SHARE NOWAIT")
    agent.join(timeout=20)
    assert [reply["stop"] for reply in told] == [[{"attempt_id": attempt_id, "epoch": 1}]]
    assert Device.objects.get().state == "unknown"
    worker.heartbeat()
    assert Device.objects.get().state == "ready"
