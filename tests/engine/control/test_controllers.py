"""The controllers of Δ and C: pure functions of recorded signals, bounded, monotone, with a reason for each change."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oppo_contract.spec import Chunk, Overcommit
from oppo_core.control.controllers import (
    MAX_CANDIDATES,
    TRIALS_PER_SIZE,
    ChunkState,
    OvercommitState,
    adjust_chunk,
    adjust_overcommit,
    chunk_candidates,
)

MANY = settings(max_examples=150, deadline=None)
SLOPE = Overcommit(controller="slope", initial=4, min=1, max=8, window=4)


def after(settings_: Overcommit, means: list[float], error: float, start: int | None = None) -> list[int]:
    """Δ before the first step and after each, for a history of mean scores of one standard error."""
    state = OvercommitState(settings_.initial if start is None else start)
    path = [state.overcommit]
    for mean in means:
        decision = adjust_overcommit(state, settings_, mean, error)
        assert (decision.old, decision.new) == (path[-1], state.overcommit)
        assert decision.reason
        path.append(state.overcommit)
    return path


@pytest.mark.parametrize(
    ("means", "error", "wanted"),
    [
        ([0, 1, 2, 3, 4], 0.1, 5),  # s = 1 > SE
        ([4, 3, 2, 1, 0], 0.1, 3),  # s = −1 < −SE
        ([0, 1, 2, 3], 0.1, 4),  # one step short of a window
        ([0, 9, -9, 9, 0], 0.1, 4),  # only the ends count; flat for one step: hold
        ([0, 0, 0, 0, 4], 2.8, 5),  # s = 1, SE = 0.99
        ([0, 0, 0, 0, 4], 2.9, 4),  # s = 1, SE = 1.03: within the noise
        ([0, 0, 0, 0, -4], 2.8, 3),
        ([0, 0, 0, 0, -4], 2.9, 4),
    ],
)
def test_the_slope_rule(means: list[float], error: float, wanted: int) -> None:
    assert after(SLOPE, means, error)[-1] == wanted


def test_a_flat_window_lowers_overcommit_once_a_window() -> None:
    path = after(SLOPE, [1.0] * 13, 0.5)
    assert path == [4] * 8 + [3] * 4 + [2] * 2  # watching for 4 steps; flat in steps 5 to 8; then a window each
    path = after(SLOPE, [1.0] * 7 + [9.0] + [1.0] * 6, 0.5)
    assert path[8] == 5, "a rise interrupts the flat steps"


@pytest.mark.parametrize(("old", "up", "down"), [(1, 2, 0), (3, 4, 2), (4, 5, 3), (8, 10, 6), (12, 15, 9)])
def test_the_proportional_rule_moves_by_a_quarter_and_at_least_one(old: int, up: int, down: int) -> None:
    rule = Overcommit(controller="slope", initial=old, min=0, max=20, window=2, rule="proportional")
    assert after(rule, [0, 1, 2], 0.0)[-1] == up
    assert after(rule, [2, 1, 0], 0.0)[-1] == down


def test_a_fixed_overcommit_never_moves() -> None:
    fixed = Overcommit(controller="fixed", initial=4, max=8, window=2)
    assert set(after(fixed, [0, 5, 10, -10, -20], 0.0)) == {4}


@st.composite
def overcommits(draw: st.DrawFn) -> Overcommit:
    low = draw(st.integers(0, 6))
    high = draw(st.integers(low, 16))
    return Overcommit(
        controller="slope", min=low, max=high, initial=draw(st.integers(low, high)), window=draw(st.integers(2, 6)),
        rule=draw(st.sampled_from(["additive", "proportional"])), step=draw(st.integers(1, 4)),
    )  # fmt: skip


MEANS = st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=30)


@MANY
@given(rule=overcommits(), means=MEANS, error=st.floats(0, 3, width=32))
def test_overcommit_stays_within_its_bounds_and_moves_with_the_slope(rule: Overcommit, means: list[float], error: float) -> None:
    path = after(rule, means, error)
    assert all(rule.min <= value <= rule.max for value in path)
    assert path[: rule.window + 1] == [rule.initial] * min(rule.window + 1, len(path)), "it moved before a window was seen"
    for number, (old, new) in enumerate(pairwise(path)):
        slope = means[number] - means[number - rule.window] if number >= rule.window else 0.0
        if new > old:
            assert slope > error * 2**0.5 - 1e-6
        if slope > error * 2**0.5 + 1e-6:
            assert new > old or new == rule.max
        if slope < -error * 2**0.5 - 1e-6:
            assert new < old or new == rule.min


@MANY
@given(rule=overcommits(), means=MEANS, error=st.floats(0, 3, width=32), rise=st.floats(0, 5, width=32))
def test_a_better_last_step_never_defers_less(rule: Overcommit, means: list[float], error: float, rise: float) -> None:
    assert after(rule, [*means[:-1], means[-1] + rise], error)[-1] >= after(rule, means, error)[-1]


@MANY
@given(rule=overcommits(), means=MEANS, error=st.floats(0.125, 3, width=32), cut=st.integers(0, 30))
def test_the_controller_has_no_hidden_state(rule: Overcommit, means: list[float], error: float, cut: int) -> None:
    """A copy of the state continues identically, as a checkpoint requires."""
    state, copy = OvercommitState(rule.initial), OvercommitState(rule.initial)
    for number, mean in enumerate(means):
        if number == cut:
            copy = OvercommitState(**asdict(state))
        assert adjust_overcommit(state, rule, mean, error) == adjust_overcommit(copy, rule, mean, error)
    assert state == copy
    assert len(state.means) <= rule.window + 1


TUNER = Chunk(controller="tuner", size=32, candidates=[8, 64, 16], explore_every=12)


def tuned(rule: Chunk, cost: Any, steps: int, longest: int = 512) -> tuple[list[int], list[Any]]:
    """C of each step, and the decisions, when a step with C costs `cost(step, C)` seconds per token."""
    state, sizes, decisions = ChunkState(rule.size), [], []
    for number in range(steps):
        sizes.append(state.current)
        decision = adjust_chunk(state, rule, longest, cost(number, state.current))
        decisions += [decision] if decision is not None else []
    return sizes, decisions


def test_the_tuner_tries_every_candidate_interleaved_and_keeps_the_cheapest() -> None:
    sizes, decisions = tuned(TUNER, lambda _, size: abs(size - 15) + 1.0, 24)
    assert sizes == [32] * 12 + [8, 16, 64] * TRIALS_PER_SIZE + [16] * 3
    assert [(d.old, d.new) for d in decisions] == [(32, 16)]
    assert all(f"{size}:" in decisions[0].reason for size in (8, 16, 64))


def test_one_slow_step_does_not_mislead_the_tuner() -> None:
    _, decisions = tuned(TUNER, lambda step, size: 100.0 if step == 13 else abs(size - 15) + 1.0, 24)
    assert decisions[0].new == 16


def test_exploration_repeats_and_follows_a_change() -> None:
    sizes, decisions = tuned(TUNER, lambda step, size: float(size if step < 22 else -size), 36)
    assert [(d.old, d.new) for d in decisions] == [(32, 8), (8, 64)]
    assert sizes[21:24] == [8] * 3
    assert sizes[33:] == [64] * 3


def test_a_fixed_chunk_is_never_touched() -> None:
    sizes, decisions = tuned(Chunk(size=24), lambda step, size: float(step), 200)
    assert (set(sizes), decisions) == ({24}, [])


@MANY
@given(size=st.integers(1, 5000), longest=st.integers(1, 20000))
def test_default_candidates_are_powers_of_two_near_the_current_size(size: int, longest: int) -> None:
    candidates = chunk_candidates(size, Chunk(controller="tuner", size=size), longest)
    assert candidates == sorted(set(candidates))
    assert 1 <= len(candidates) <= MAX_CANDIDATES == 5
    assert all(c & (c - 1) == 0 and 8 <= c <= max(8, longest // 2) for c in candidates)
    assert all(other == 2 * one for one, other in pairwise(candidates)), "neighbours"
    if 8 <= size <= longest // 2:
        assert candidates[0] <= size < 2 * candidates[-1]


@MANY
@given(
    costs=st.lists(
        st.lists(st.floats(1, 2, width=32), min_size=TRIALS_PER_SIZE, max_size=TRIALS_PER_SIZE), min_size=2, max_size=5
    ),
    every=st.integers(1, 7),
)
def test_the_tuner_picks_the_lowest_median(costs: list[list[float]], every: int) -> None:
    candidates = [4 * (number + 1) for number in range(len(costs))]
    medians = [median(row) for row in costs]
    assume(len(set(medians)) == len(medians))
    rule = Chunk(controller="tuner", size=999, candidates=candidates, explore_every=every)
    seen: dict[int, int] = dict.fromkeys(candidates, 0)

    def cost(_: int, size: int) -> float:
        if size == rule.size:
            return 1.0
        seen[size] += 1
        return costs[candidates.index(size)][seen[size] - 1]

    _, decisions = tuned(rule, cost, every + TRIALS_PER_SIZE * len(costs))
    assert [d.new for d in decisions] == [candidates[medians.index(min(medians))]]
