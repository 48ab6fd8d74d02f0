"""A run moves along the table only, once, and every move leaves a row."""

import pytest

from oppo_contract.states import TRANSITIONS, RunState
from oppo_platform.runs.lifecycle import cancel_run
from oppo_platform.runs.models import Run, Transition
from oppo_platform.runs.transitions import MoveRefused, RunMoved, move_run


@pytest.mark.parametrize("old", list(RunState))
def test_every_move_of_the_table_works_and_no_other(world, old):
    for new in RunState:
        run = world.submit()
        Run.objects.filter(pk=run.pk).update(state=old)
        run.refresh_from_db()
        before = run.cursor
        if new in TRANSITIONS[old]:
            move_run(run, new, "because", "test")
            assert run.cursor == before + 1
            row = run.transitions.order_by("-id").first()
            assert (row.old, row.new, row.reason, row.actor) == (old, new, "because", "test")
        else:
            with pytest.raises(MoveRefused):
                move_run(run, new, "because", "test")
            assert run.transitions.count() == 1
        assert Run.objects.get(pk=run.pk).state == (new if new in TRANSITIONS[old] else old)


def test_of_two_who_move_a_run_at_once_one_wins(world, at_once):
    run_id = world.submit().pk

    def move_to(state):
        run = Run.objects.get(pk=run_id)
        return lambda: move_run(run, state, "race", "test")

    results = at_once(move_to(RunState.ALLOCATED), move_to(RunState.CANCELLED))
    assert sorted(type(result).__name__ for result in results) == ["NoneType", "RunMoved"]
    assert Transition.objects.filter(run=run_id).count() == 2
    assert Run.objects.get(pk=run_id).cursor == 2


def test_a_stale_reader_is_refused(world):
    run = world.submit()
    stale = Run.objects.get(pk=run.pk)
    cancel_run(run.pk, "user:ada")
    with pytest.raises(RunMoved):
        move_run(stale, RunState.ALLOCATED, "late", "test")


def test_times_of_start_and_end(world):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    assert run.started_at == world.clock.now()
    world.clock.advance(60)
    worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": "succeeded", "reason": "All steps done."})
    run.refresh_from_db()
    assert (run.state, run.ended_at) == ("succeeded", world.clock.now())
    said = [(t.old, t.new) for t in run.transitions.order_by("id")]
    assert said == [
        ("", "queued"),
        ("queued", "allocated"),
        ("allocated", "starting"),
        ("starting", "running"),
        ("running", "succeeded"),
    ]
