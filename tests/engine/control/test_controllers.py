"""The controllers of Δ and C: pure functions of recorded signals, bounded, monotone, with a reason for each change."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oppo_contract.spec import Chunk, Overcommit
from oppo_core.control.controllers import (
    HISTORY,
    MAX_CANDIDATES,
    STEPS_PER_TRIAL,
    TRIALS_PER_SIZE,
    ChunkState,
    OvercommitState,
    adjust_chunk,
    adjust_overcommit,
    chunk_candidates,
    score_slope,
)

MANY = settings(max_examples=150, deadline=None)
SLOPE = Overcommit(controller="slope", initial=4, min=1, max=8, window=4)


def after(settings_: Overcommit, means: list[float], start: int | None = None) -> list[int]:
    """Δ before the first step and after each, for a history of mean scores."""
    state = OvercommitState(settings_.initial if start is None else start)
    path = [state.overcommit]
    for mean in means:
        decision = adjust_overcommit(state, settings_, mean)
        assert (decision.old, decision.new) == (path[-1], state.overcommit)
        assert decision.reason
        path.append(state.overcommit)
    return path


@pytest.mark.parametrize(
    ("means", "wanted"),
    [
        ([0, 1, 2, 3, 4], 5),
        ([4, 3, 2, 1, 0], 3),
        ([0, 1, 2, 3], 4),  # one step short of a window
        ([0, 9, -9, 9, 4], 4),  # s = 0.8, SE = 2.8: within the noise
        ([0, 3, 2, 6, 8], 5),  # s = 1.9, SE = 0.46
        ([8, 6, 2, 3, 0], 3),
        ([0.1] * 5, 4),  # rounding is no slope
    ],
)
def test_the_slope_rule(means: list[float], wanted: int) -> None:
    assert after(SLOPE, means)[-1] == wanted


def test_without_a_rise_for_a_window_overcommit_falls_until_the_score_rises() -> None:
    path = after(SLOPE, [1.0] * 11 + [50.0, 100.0, 150.0, 200.0])
    assert path[:12] == [4] * 8 + [3, 2, 1, 1]  # four steps are collected, four have no rise
    assert path[-1] > 1


def test_standard_error_of_independent_noise_is_that_of_least_squares() -> None:
    """Against numpy's covariance of the coefficients; the autocorrelation is corrected away to a few percent on average."""
    draw, ratios = np.random.default_rng(0), []
    for _ in range(200):
        y = draw.normal(size=41)
        slope, error = score_slope(list(y), 40)
        coefficients, covariance = np.polyfit(np.arange(41), y, 1, cov=True)
        assert slope == pytest.approx(coefficients[0], abs=1e-12)
        ratios.append(error / covariance[0, 0] ** 0.5)
    assert min(ratios) > 0.99, "the error is never smaller than with independent noise"
    assert 1 <= median(ratios) < 1.2


def noise(draw: np.random.Generator, steps: int, autocorrelation: float) -> np.ndarray:
    """AR(1) with unit variance."""
    values = np.zeros(steps)
    values[0] = draw.normal()
    for number, shock in enumerate(draw.normal(scale=(1 - autocorrelation**2) ** 0.5, size=steps - 1)):
        values[number + 1] = autocorrelation * values[number] + shock
    return values


@pytest.mark.parametrize(("autocorrelation", "limit"), [(0.0, 0.05), (0.3, 0.05), (0.5, 0.08)])
def test_on_a_flat_score_overcommit_seldom_moves(autocorrelation: float, limit: float) -> None:
    rule = Overcommit(controller="slope")
    moves = [
        np.mean(np.diff(after(rule, list(noise(np.random.default_rng(seed), 1000, autocorrelation)))) != 0) for seed in range(6)
    ]
    assert np.mean(moves) <= limit


@pytest.mark.parametrize("seeds", [40, pytest.param(300, marks=pytest.mark.full)])
def test_after_a_rise_that_ends_overcommit_falls_to_its_minimum(seeds: int) -> None:
    """200 steps after the rise, Δ is above Δ_max/4 in at most a quarter of the seeds."""
    rule, rise = Overcommit(controller="slope"), np.concatenate([np.linspace(0, 3, 60), np.full(200, 3.0)])
    paths = [after(rule, list(rise + 0.2 * np.random.default_rng(seed).normal(size=260))) for seed in range(seeds)]
    assert np.mean([path[60] for path in paths]) > rule.max / 2, "the rise raises Δ"
    assert np.mean([path[-1] > rule.max / 4 for path in paths]) <= 0.25
    assert np.mean([path[-1] == 0 for path in paths]) > 0.5


@pytest.mark.parametrize(("old", "up", "down"), [(1, 2, 0), (3, 4, 2), (4, 5, 3), (8, 10, 6), (12, 15, 9)])
def test_the_proportional_rule_moves_by_a_quarter_and_at_least_one(old: int, up: int, down: int) -> None:
    rule = Overcommit(controller="slope", initial=old, min=0, max=20, window=2, rule="proportional")
    assert after(rule, [0, 1, 2])[-1] == up
    assert after(rule, [2, 1, 0])[-1] == down


def test_a_fixed_overcommit_never_moves() -> None:
    fixed = Overcommit(controller="fixed", initial=4, max=8, window=2)
    assert set(after(fixed, [0, 5, 10, -10, -20])) == {4}


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
@given(rule=overcommits(), means=MEANS)
def test_overcommit_stays_within_its_bounds_and_moves_with_the_slope(rule: Overcommit, means: list[float]) -> None:
    path = after(rule, means)
    assert all(rule.min <= value <= rule.max for value in path)
    assert path[: rule.window + 1] == [rule.initial] * min(rule.window + 1, len(path)), "it moved before a window was seen"
    for number, (old, new) in enumerate(pairwise(path)):
        if number >= rule.window:
            slope, error = score_slope(means[max(0, number - HISTORY * rule.window) : number + 1], rule.window)
            assert new <= old or slope > 2 * error
            assert slope <= 2 * error or new > old or new == rule.max
            assert slope >= -2 * error or new < old or new == rule.min


@MANY
@given(rule=overcommits(), means=MEANS, shift=st.sampled_from([-64.0, 8.0]), scale=st.sampled_from([0.125, 4.0]))
def test_units_of_the_score_do_not_matter(rule: Overcommit, means: list[float], shift: float, scale: float) -> None:
    rounded = [round(mean, 2) for mean in means]
    moved = [round(mean, 2) * scale + shift for mean in means]
    slopes = [score_slope(rounded[: n + 1][-9:], 2) for n in range(2, len(rounded))]
    assume(all(abs(abs(slope) - 2 * error) > 1e-6 for slope, error in slopes))
    rule = rule.model_copy(update={"window": 2})
    assert after(rule, rounded) == after(rule, moved)


@MANY
@given(rule=overcommits(), means=MEANS, cut=st.integers(0, 30))
def test_the_controller_has_no_hidden_state(rule: Overcommit, means: list[float], cut: int) -> None:
    """A copy of the state continues identically, as a checkpoint requires."""
    state, copy = OvercommitState(rule.initial), OvercommitState(rule.initial)
    for number, mean in enumerate(means):
        if number == cut:
            copy = OvercommitState(**asdict(state))
        assert adjust_overcommit(state, rule, mean) == adjust_overcommit(copy, rule, mean)
    assert state == copy
    assert len(state.means) <= HISTORY * rule.window + 1


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
    sizes, decisions = tuned(TUNER, lambda step, size: float(size if step < 22 else -size), 500)
    wait = STEPS_PER_TRIAL * 9
    assert [(d.old, d.new) for d in decisions] == [(32, 8), (8, 64)]
    assert sizes[21 : 20 + wait] == [8] * (wait - 1)
    assert sizes[-1] == 64


def test_waits_double_while_nothing_changes() -> None:
    sizes, decisions = tuned(TUNER.model_copy(update={"size": 16}), lambda _, size: abs(size - 15) + 1.0, 8000)
    starts = [number for number, (old, new) in enumerate(pairwise(sizes), 1) if (old, new) == (16, 8) and sizes[number - 2] == 16]
    assert [d.new for d in decisions] == [16] * 4
    waits = [later - earlier for earlier, later in pairwise(starts)]
    assert [round(later / earlier) for earlier, later in pairwise(waits)] == [2, 2]


@pytest.mark.parametrize("steps", [200, 600, 1000, 5000])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_few_steps_are_trials(steps: int, jitter: float) -> None:
    """After the first 100, under 3 %, even if each exploration chooses another size at random."""
    draw, rule = np.random.default_rng(1), Chunk(controller="tuner", size=32)
    state, trials = ChunkState(rule.size), 0
    for number in range(steps):
        trials += number >= 100 and state.trying is not None
        adjust_chunk(state, rule, 512, abs(state.current - 40) / 100 + 1 + jitter * draw.normal())
    assert trials < 0.03 * (steps - 100)


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
