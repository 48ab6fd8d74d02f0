"""Pause, resume, preempt, cancel, priority and time limit at every moment of a run's life, and two wishes at once."""

from datetime import timedelta

import pytest

from oppo_contract.states import ENDED, HOLDING_DEVICES, RunState, can_transition
from oppo_platform.runs import lifecycle
from oppo_platform.runs.allowed_actions import allowed_actions
from oppo_platform.runs.lifecycle import NotPossible, cancel_run, pause_run, preempt_run, resume_run
from oppo_platform.runs.models import Allocation, Attempt, Change, Run
from oppo_platform.scheduling.build_snapshot import build_snapshot

S = RunState
STATES = list(RunState)
ADA = "user:ada"


def bring_to(world, state, **changes):
    """A run in a state, by its ordinary way there: (run, worker, attempt id or None)."""
    worker, attempt_id = None, None
    if state in (S.QUEUED, S.PAUSED, S.CANCELLED):
        run = world.submit(**changes)
        if state != S.QUEUED:
            (pause_run if state == S.PAUSED else cancel_run)(run.pk, ADA)
    else:
        worker = world.worker()
        if state in (S.ALLOCATED, S.STARTING):
            run = world.submit(**changes)
            world.cycle()
            attempt_id = run.attempts.get().pk
            if state == S.STARTING:
                worker.claim(attempt_id)
        else:
            run, attempt_id = world.start(worker, **changes)
            wish = {S.PAUSING: pause_run, S.CANCELLING: cancel_run, S.PREEMPTING: preempt_run}.get(state)
            if wish is not None:
                wish(run.pk, ADA)
            elif state in ENDED:
                worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": state, "reason": "so it was"})
    run.refresh_from_db()
    assert run.state == state
    return run, worker, attempt_id


def beat(worker, attempt_id):
    return worker.attempt(attempt_id, "heartbeat", {"epoch": 1, "running": True})


def stop(worker, attempt_id, outcome):
    """The supervisor obeys: the outcome is told, and the run's state and the law are looked at."""
    reply = worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": outcome, "reason": "Stopped at step 3."})
    assert reply.status_code == 200, reply.content
    run = Run.objects.get(attempts=attempt_id)
    assert_lawful(run)
    return run.state


def assert_lawful(run):
    """The table was followed without a gap, and devices are held exactly in the states that hold them."""
    rows = list(run.transitions.order_by("id"))
    assert [row.old for row in rows] == ["", *(row.new for row in rows[:-1])]
    assert all(can_transition(RunState(row.old), RunState(row.new)) for row in rows[1:])
    assert rows[-1].new == run.state
    held = Allocation.objects.filter(attempt__run=run, released_at__isnull=True).exists()
    assert held == (run.state in HOLDING_DEVICES)


CANCELLED_FROM = dict.fromkeys(STATES, S.CANCELLING) | dict.fromkeys((S.QUEUED, S.ALLOCATED, S.PAUSED), S.CANCELLED)
PAUSED_FROM = {
    S.QUEUED: S.PAUSED, S.ALLOCATED: S.PAUSED, S.PAUSED: S.PAUSED, S.STARTING: S.PAUSING, S.RUNNING: S.PAUSING,
    S.PAUSING: S.PAUSING, S.PREEMPTING: S.PAUSING,
}  # fmt: skip
PREEMPTED_FROM = {S.ALLOCATED: S.QUEUED, S.STARTING: S.PREEMPTING, S.RUNNING: S.PREEMPTING}


@pytest.mark.parametrize("state", STATES)
def test_a_cancel_in_every_state(world, state):
    run, worker, attempt_id = bring_to(world, state)
    cancel_run(run.pk, ADA)
    run.refresh_from_db()
    assert run.state == (state if state in ENDED else CANCELLED_FROM[state])
    assert_lawful(run)
    if run.state == S.CANCELLING:
        assert beat(worker, attempt_id).json()["signal"] == "cancel"
        assert stop(worker, attempt_id, "cancelled") == "cancelled"


@pytest.mark.parametrize("state", STATES)
def test_a_pause_in_every_state(world, state):
    run, worker, attempt_id = bring_to(world, state)
    if state not in PAUSED_FROM:
        with pytest.raises(NotPossible):
            pause_run(run.pk, ADA)
        assert Run.objects.get(pk=run.pk).state == state
        return
    pause_run(run.pk, ADA)
    run.refresh_from_db()
    assert run.state == PAUSED_FROM[state]
    assert_lawful(run)
    if run.state == S.PAUSING:
        assert beat(worker, attempt_id).json()["signal"] == "pause"
        assert stop(worker, attempt_id, "paused") == "paused"
    resume_run(run.pk, ADA)
    assert Run.objects.get(pk=run.pk).state == "queued"


@pytest.mark.parametrize("state", STATES)
def test_a_preemption_in_every_state(world, state):
    run, worker, attempt_id = bring_to(world, state)
    place = run.queued_at
    freed = preempt_run(run.pk, "Makes room for run 7.")
    run.refresh_from_db()
    assert run.state == PREEMPTED_FROM.get(state, state)
    assert freed == (state in HOLDING_DEVICES)
    assert_lawful(run)
    if run.state == S.PREEMPTING:
        assert beat(worker, attempt_id).json()["signal"] == "preempt"
        world.clock.advance(60)
        assert stop(worker, attempt_id, "preempted") == "queued"
    assert Run.objects.get(pk=run.pk).queued_at == place


def test_the_scheduler_counts_a_runs_preemptions_and_no_other_stops(world):
    run, worker, attempt_id = bring_to(world, S.PAUSING)
    resume_run(run.pk, ADA)  # it becomes preempting, but makes room for nobody
    stop(worker, attempt_id, "paused")
    assert [waiting.preempted for waiting in build_snapshot(world.clock.now()).waiting] == [0]
    world.cycle()
    attempt_id = run.attempts.get(epoch=2).pk
    worker.claim(attempt_id, 2)
    preempt_run(run.pk, "Makes room for run 7.")
    worker.attempt(attempt_id, "outcome", {"epoch": 2, "outcome": "preempted", "reason": "Stopped at step 3."})
    assert [waiting.preempted for waiting in build_snapshot(world.clock.now()).waiting] == [1]
    world.cycle()
    assert [running.preempted for running in build_snapshot(world.clock.now()).running] == [1]


@pytest.mark.parametrize("state", STATES)
def test_the_page_offers_what_the_services_do(world, state):
    """A wish is offered exactly where it is not refused, and where it would change something."""
    run, _, _ = bring_to(world, state)
    offered = allowed_actions(run.state, limited=False)
    assert ("cancel" in offered) == (state not in ENDED | {S.CANCELLING})
    assert ("pause" in offered) == (state in PAUSED_FROM and PAUSED_FROM[state] != state)
    assert ("resume" in offered) == (state in (S.PAUSED, S.PAUSING))
    assert ("priority" in offered) == (state not in ENDED | {S.CANCELLING})
    assert all(sentence.endswith(".") for sentence in offered.values())


@pytest.mark.parametrize("outcome", ["paused", "preempted", "engine_died"])
def test_resumed_while_it_pauses_it_goes_to_the_queue_with_its_place(world, outcome):
    run, worker, attempt_id = bring_to(world, S.PAUSING)
    place = run.queued_at
    world.clock.advance(3)
    resume_run(run.pk, ADA)
    assert beat(worker, attempt_id).json()["signal"] == "preempt"
    assert stop(worker, attempt_id, outcome) == "queued"
    assert Run.objects.get(pk=run.pk).queued_at == place


@pytest.mark.parametrize("outcome", ["paused", "preempted", "engine_died"])
def test_run_is_paused_however_its_pausing_engine_ends(world, outcome):
    """Its node's shutdown, which reports `preempted`, and a death included."""
    _, worker, attempt_id = bring_to(world, S.PAUSING)
    assert stop(worker, attempt_id, outcome) == "paused"


@pytest.mark.parametrize("state", [S.PAUSING, S.PREEMPTING, S.CANCELLING])
@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_an_engine_that_was_faster_than_the_wish(world, state, outcome):
    _, worker, attempt_id = bring_to(world, state)
    assert stop(worker, attempt_id, outcome) == outcome


def test_a_cancel_while_pausing_and_while_preempting_is_final(world):
    for first in (pause_run, preempt_run):
        run, worker, attempt_id = bring_to(world, S.RUNNING)
        first(run.pk, ADA)
        cancel_run(run.pk, ADA)
        assert preempt_run(run.pk, "Makes room.")
        for late in (pause_run, resume_run):
            with pytest.raises(NotPossible):
                late(run.pk, ADA)
        assert beat(worker, attempt_id).json()["signal"] == "cancel"
        assert stop(worker, attempt_id, "preempted") == "cancelled"


WISHES = {
    "cancel": lambda run_id: cancel_run(run_id, ADA),
    "pause": lambda run_id: pause_run(run_id, ADA),
    "preempt": lambda run_id: preempt_run(run_id, "Makes room."),
    "resume": lambda run_id: resume_run(run_id, ADA),
}
# What two wishes at a running run come to, in whichever order they arrive.
EITHER_ORDER = {
    ("cancel", "pause"): (S.CANCELLING,),
    ("cancel", "preempt"): (S.CANCELLING,),
    ("pause", "preempt"): (S.PAUSING,),
    ("pause", "resume"): (S.PAUSING, S.PREEMPTING),
    ("preempt", "resume"): (S.PREEMPTING,),
}


@pytest.mark.parametrize(("pair", "expected"), EITHER_ORDER.items(), ids=lambda value: "-".join(map(str, value)))
def test_two_wishes_in_both_orders_and_at_once(world, at_once, pair, expected):
    def attempt_both(arrange):
        run, worker, attempt_id = bring_to(world, S.RUNNING)
        results = arrange(run.pk)
        assert all(not isinstance(r, Exception) or isinstance(r, NotPossible) for r in results), results
        run.refresh_from_db()
        assert run.state in expected
        assert_lawful(run)
        stop(worker, attempt_id, "preempted")
        cancel_run(run.pk, ADA)

    def one_after_the_other(order):
        def arrange(run_id):
            results = []
            for name in order:
                try:
                    results.append(WISHES[name](run_id))
                except NotPossible as refused:
                    results.append(refused)
            return results

        return arrange

    attempt_both(one_after_the_other(pair))
    attempt_both(one_after_the_other(pair[::-1]))
    attempt_both(lambda run_id: at_once(*[lambda name=name: WISHES[name](run_id) for name in pair]))


@pytest.mark.parametrize("wish", ["cancel", "pause", "preempt"])
@pytest.mark.parametrize("outcome", ["succeeded", "engine_died"])
def test_an_outcome_that_arrives_together_with_a_wish(world, at_once, wish, outcome):
    run, worker, attempt_id = bring_to(world, S.RUNNING)
    told = {"epoch": 1, "outcome": outcome, "reason": "so it was"}
    results = at_once(lambda: worker.attempt(attempt_id, "outcome", told), lambda: WISHES[wish](run.pk))
    assert results[0].status_code == 200
    assert not isinstance(results[1], Exception) or isinstance(results[1], NotPossible)
    run.refresh_from_db()
    # Whoever came first, the attempt is over, the devices are free, and the run has ended, is held, or waits.
    assert run.state in ({S.SUCCEEDED} if outcome == "succeeded" else {S.QUEUED, S.PAUSED, S.CANCELLED})
    assert not Attempt.objects.get(pk=attempt_id).live
    assert_lawful(run)


def test_the_deadline_is_kept_on_the_databases_clock_and_told_as_what_is_left(world, settings):
    settings.OPPO_STOP_DEADLINE_S, settings.OPPO_CANCEL_DEADLINE_S = 100, 5
    run, worker, attempt_id = bring_to(world, S.RUNNING)
    pause_run(run.pk, ADA)
    assert beat(worker, attempt_id).json()["deadline_s"] == 100
    world.clock.advance(30)
    assert beat(worker, attempt_id).json()["deadline_s"] == 70
    preempt_run(run.pk, "Makes room.")
    resume_run(run.pk, ADA)  # changes what becomes of the run, not the engine's time
    assert beat(worker, attempt_id).json()["deadline_s"] == 70
    cancel_run(run.pk, ADA)
    assert beat(worker, attempt_id).json()["deadline_s"] == 5
    world.clock.advance(50)
    assert beat(worker, attempt_id).json()["deadline_s"] == 0


def test_a_supervisor_that_never_acknowledges_loses_its_lease(world, settings):
    """It renews its lease for ever, and its engine hangs in the kernel: past the deadline the renewals do not count."""
    settings.OPPO_STOP_DEADLINE_S, settings.OPPO_LEASE_S = 20, 60
    run, worker, attempt_id = bring_to(world, S.RUNNING)
    preempt_run(run.pk, "Makes room.")
    for _ in range(20):
        world.clock.advance(5)
        world.cycle()
        reply = beat(worker, attempt_id)
        if reply.status_code == 409:
            break
        assert reply.json()["lease_s"] <= 60
    assert reply.json()["reason"] == "lease_lost"
    run.refresh_from_db()
    assert run.state == "queued"
    assert world.clock.now() - run.queued_at <= timedelta(seconds=20 + 60 + 10)


def test_place_in_the_queue_after_pause_and_preemption(world):
    first, worker, attempt_id = bring_to(world, S.RUNNING)
    world.clock.advance(1)
    second = world.submit()
    preempt_run(first.pk, "Makes room.")
    stop(worker, attempt_id, "preempted")

    def order():
        return list(Run.objects.filter(state="queued").order_by("-priority", "queued_at", "id").values_list("pk", flat=True))

    assert order() == [first.pk, second.pk]
    pause_run(first.pk, ADA)
    world.clock.advance(1)
    resume_run(first.pk, ADA)
    assert order() == [second.pk, first.pk]
    world.cycle()
    second.refresh_from_db()
    assert second.state == "allocated"


def test_priorities_order_the_queue_and_are_written_down(world):
    first, second = world.submit(), world.submit(priority=51)
    assert (first.priority, second.priority) == (50, 51)
    before = first.cursor
    lifecycle.set_priority(first.pk, 99, ADA)
    first.refresh_from_db()
    assert (first.priority, first.cursor) == (99, before + 1)
    assert [(c.what, c.reason, c.actor) for c in Change.objects.all()] == [("priority", "Priority 50 became 99.", ADA)]
    world.worker()
    world.cycle()
    first.refresh_from_db()
    assert first.state == "allocated"
    for refused in (0, 100, -1):
        with pytest.raises(NotPossible):
            lifecycle.set_priority(first.pk, refused, ADA)


def test_a_run_that_ends_just_as_its_time_is_used_up_stops_no_cycle(world, monkeypatch):
    bring_to(world, S.RUNNING, queue={"max_runtime_hours": 0.01})
    other = world.submit()
    locked = lifecycle._locked

    def ended_meanwhile(run_id):
        Run.objects.filter(pk=run_id).update(state=S.CANCELLED)
        return locked(run_id)

    monkeypatch.setattr(lifecycle, "_locked", ended_meanwhile)
    world.clock.advance(37)
    world.worker("another")
    world.cycle()
    other.refresh_from_db()
    assert other.state == "allocated"


def test_a_run_whose_time_is_used_up_is_paused_and_goes_on_when_extended(world):
    run, worker, attempt_id = bring_to(world, S.RUNNING, queue={"max_runtime_hours": 0.01})
    world.clock.advance(35)
    world.cycle()
    assert beat(worker, attempt_id).json()["signal"] is None
    world.clock.advance(1)
    world.cycle()
    run.refresh_from_db()
    assert (run.state, run.reason) == ("pausing", "The time limit of 0.01 h is reached. Extend and resume the run.")
    assert stop(worker, attempt_id, "paused") == "paused"
    with pytest.raises(NotPossible, match="extend it first"):
        resume_run(run.pk, ADA)
    lifecycle.extend_run(run.pk, 1, ADA)
    resume_run(run.pk, ADA)
    worker.heartbeat()
    world.cycle()
    run.refresh_from_db()
    assert run.state == "allocated"
    with pytest.raises(NotPossible, match="no time limit"):
        lifecycle.extend_run(world.submit().pk, 1, ADA)


def test_wishes_over_http(world):
    run, _, _ = bring_to(world, S.RUNNING, queue={"max_runtime_hours": 2})
    ada, url = world.login("ada"), f"/api/v1/runs/{run.pk}"

    def ask(wish, body=None):
        return ada.post(f"{url}/{wish}", body or {}, content_type="application/json")

    assert set(ada.get(url).json()["wishes"]) == {"pause", "cancel", "priority", "extend"}
    assert ask("priority", {"priority": 70}).json()["priority"] == 70
    assert ask("priority", {"priority": 100}).status_code == 422
    assert ask("extend", {"hours": 1}).json()["max_runtime_s"] == 3 * 3600
    assert ask("pause").json()["state"] == "pausing"
    assert ask("resume").json()["state"] == "preempting"
    refused = ask("resume")
    assert (refused.status_code, refused.json()["detail"]) == (409, "Cannot resume a run that is preempting.")
    assert ask("cancel").json()["state"] == "cancelling"
    said = ada.get(f"{url}/events").content.decode()
    assert "Priority 50 became 70." in said
    assert "Extended by 1 h; the time limit is now 3 h." in said


@pytest.mark.parametrize("wish", ["pause", "resume", "cancel", "priority", "extend"])
def test_only_those_who_may_steer_a_run(world, wish):
    run = world.submit()
    body = {"priority": {"priority": 1}, "extend": {"hours": 1}}.get(wish, {})
    for name, status in (("vic", 403), ("ben", 403), ("eve", 404)):
        reply = world.login(name).post(f"/api/v1/runs/{run.pk}/{wish}", body, content_type="application/json")
        assert reply.status_code == status, name
    assert Run.objects.get(pk=run.pk).state == "queued"


def test_settings_of_the_platform_are_not_sent_to_workers(world):
    """An engine of an older version would refuse keys that it does not know."""
    worker = world.worker()
    run = world.submit(queue={"max_runtime_hours": 1})
    world.cycle()
    spec = worker.claim(run.attempts.get().pk).json()["spec"]
    assert {"queue", "retries"} & spec.keys() == set()
    assert {"queue", "retries"} <= run.spec.keys()
