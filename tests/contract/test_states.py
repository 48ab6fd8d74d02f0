"""The transition table: complete, reachable, with end states, and as designed."""

from __future__ import annotations

import itertools

import pytest

from oppo_contract.states import ENDED, HOLDING_DEVICES, TRANSITIONS, RunState, can_transition

S = RunState


def reachable_from(start: RunState) -> set[RunState]:
    """Every state reachable from `start`, `start` included."""
    seen, waiting = {start}, [start]
    while waiting:
        for state in TRANSITIONS[waiting.pop()] - seen:
            seen.add(state)
            waiting.append(state)
    return seen


def test_the_table_names_every_state() -> None:
    assert set(TRANSITIONS) == set(RunState)
    assert reachable_from(S.QUEUED) == set(RunState)


@pytest.mark.parametrize("state", RunState)
def test_an_ended_state_is_final_and_every_other_can_end(state: RunState) -> None:
    if state in ENDED:
        assert TRANSITIONS[state] == ({S.QUEUED} if state == S.FAILED else frozenset())  # a user may retry it
    else:
        assert reachable_from(state) & ENDED
        assert reachable_from(state) >= {S.CANCELLED}
        assert not can_transition(state, state)


def test_states_that_may_return_to_the_queue() -> None:
    returning = {state for state in RunState if can_transition(state, S.QUEUED)}
    assert returning == {S.ALLOCATED, S.STARTING, S.RUNNING, S.PAUSING, S.PREEMPTING, S.PAUSED, S.FAILED}


def test_a_paused_run_waits_or_ends_and_does_nothing_else() -> None:
    assert TRANSITIONS[S.PAUSED] == {S.QUEUED, S.CANCELLED}


@pytest.mark.parametrize("state", [S.PAUSING, S.PREEMPTING, S.CANCELLING])
def test_engine_may_end_before_a_request_reaches_it(state: RunState) -> None:
    assert can_transition(state, S.SUCCEEDED)
    assert can_transition(state, S.FAILED)


def test_transitions_of_an_ordinary_run() -> None:
    way = [S.QUEUED, S.ALLOCATED, S.STARTING, S.RUNNING, S.SUCCEEDED]
    assert all(can_transition(old, new) for old, new in itertools.pairwise(way))


def test_every_live_state_can_be_cancelled_at_once_or_by_way_of_cancelling() -> None:
    for state in set(RunState) - ENDED - {S.CANCELLING}:
        assert can_transition(state, S.CANCELLING) or can_transition(state, S.CANCELLED), state


def test_devices_are_held_from_allocation_to_the_end_and_not_while_waiting() -> None:
    assert HOLDING_DEVICES.isdisjoint(ENDED | {S.QUEUED, S.PAUSED})
    assert HOLDING_DEVICES | ENDED | {S.QUEUED, S.PAUSED} == set(RunState)
    # Devices are taken by allocation only.
    for state in (S.QUEUED, S.PAUSED):
        assert TRANSITIONS[state] & HOLDING_DEVICES <= {S.ALLOCATED}
