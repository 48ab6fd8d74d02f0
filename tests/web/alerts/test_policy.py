"""The policy of alerts against plain words: nothing flaps, more is never less, and folding in pieces is folding at once."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oppo_platform.alerts import policy
from oppo_platform.alerts.policy import DEFAULTS, SLACK, Condition, RewardMemory, Rule

C = Condition
VALUES = st.floats(-1e6, 1e6, allow_nan=False)
ANY = st.one_of(VALUES, st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308]))
WINDOWS = st.integers(2, 12)


def history(values, threshold, slack):
    """What becomes of an alert: the steps at which it opens and closes."""
    is_open, moves = False, []
    for at, value in enumerate(values):
        verdict = policy.crossed(is_open, value, threshold, slack)
        if verdict != "keep":
            is_open = verdict == "open"
            moves.append((at, verdict))
    return moves


@given(values=st.lists(ANY, max_size=60), threshold=st.floats(0.01, 1e3), slack=st.sampled_from([0.0, *SLACK.values()]))
def test_an_alert_moves_only_across_the_whole_slack(values, threshold, slack):
    moves = history(values, threshold, slack)
    assert [verdict for _, verdict in moves] == (["open", "close"] * len(moves))[: len(moves)]
    for at, verdict in moves:
        assert values[at] > threshold if verdict == "open" else values[at] < threshold * (1 - slack)
    # Between the two bounds nothing ever happens.
    inside = [value if not math.isfinite(value) else threshold * (1 - slack / 2) for value in values if not value > threshold]
    assert history(inside, threshold, slack) == []


@given(
    is_open=st.booleans(),
    low=VALUES,
    more=st.floats(0, 1e6),
    threshold=st.floats(0.01, 1e3),
    slack=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_a_higher_value_is_never_less_of_an_alert(is_open, low, more, threshold, slack):
    order = {"close": 0, "keep": 1, "open": 2}
    at = order[policy.crossed(is_open, low, threshold, slack)]
    assert order[policy.crossed(is_open, low + more, threshold, slack)] >= at
    assert (
        policy.crossed(is_open, low, threshold + more, slack) != "open"
        or policy.crossed(is_open, low, threshold, slack) == "open"
    )


@given(values=st.lists(ANY, max_size=30), window=WINDOWS)
def test_window_mean_needs_a_full_finite_window(values, window):
    told, last = policy.window_mean(values, window), values[-window:]
    if len(last) < window or any(not abs(value) < policy.LARGEST for value in last):
        assert told is None
    else:
        assert told == pytest.approx(fmean(last), abs=1e-6)


def oracle(values, window):
    """The reward's memory in plain words, over the whole series at once: (levels, noises, [(bound, level), …])."""
    finite = [value for value in values if abs(value) < policy.LARGEST]
    levels, noises = [], []
    for count, value in enumerate(finite, 1):
        before, noise = (levels[-1], noises[-1]) if levels else (0.0, 0.0)
        weight = 1 / count if 1 / count > 2 / (window + 1) else 2 / (window + 1)
        noises.append((1 - weight) * noise + weight * (value - before) ** 2 if count > 1 else 0.0)
        levels.append((1 - weight) * before + weight * value)
    if len(levels) < window:
        return levels, noises, []
    warm = list(zip(levels, noises, strict=True))[window:]
    start = levels[window - 1]
    bounds = [(start, start), *((level - policy.MIN_SIGMAS * math.sqrt(noise / window), level) for level, noise in warm)]
    return levels, noises, bounds


def folded(values, window, memory=None):
    memory = memory or RewardMemory()
    for value in values:
        memory = memory.updated(value, window)
    return memory


@given(values=st.lists(ANY, max_size=60), window=WINDOWS, cut=st.integers(0, 60))
def test_the_memory_equals_the_oracle_however_it_is_cut(values, window, cut):
    memory = folded(values[cut:], window, folded(values[:cut], window))
    assert memory == folded(values, window)
    levels, noises, bounds = oracle(values, window)
    assert memory.count == len(levels)
    assert memory.level == pytest.approx(levels[-1] if levels else 0.0, rel=1e-6, abs=1e-3)
    assert memory.noise == pytest.approx(noises[-1] if noises else 0.0, rel=1e-6, abs=1e-3)
    assert (memory.start is None) == (bounds == [])
    if bounds:
        assert memory.start == pytest.approx(bounds[0][1], rel=1e-6, abs=1e-3)
        top = max(bound for bound, _ in bounds)
        assert memory.sure == pytest.approx(top, rel=1e-6, abs=1e-3)
        near = pytest.approx(top, rel=1e-6, abs=1e-3)  # rounding may decide between two that are as good
        assert any(bound == near and memory.best == pytest.approx(level, rel=1e-6, abs=1e-3) for bound, level in bounds)


@given(values=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30), window=WINDOWS)
@example(values=[0.0, -1.1125369292536007e-308, 0.0, 2.0], window=2)
def test_reward_memory_is_finite_for_any_values(values, window):
    memory = folded(values, window)
    stored = [
        memory.level,
        memory.noise,
        memory.start or 0.0,
        memory.best or 0.0,
        policy.reward_drop(memory, window).share or 0.0,
    ]
    assert all(math.isfinite(number) for number in stored)


def collapses(values, rule):
    """Steps at which the alert opens and closes."""
    memory, is_open, moves = RewardMemory(), False, []
    for step, value in enumerate(values, 1):
        memory = memory.updated(value, rule.window_steps)
        verdict = policy.collapsed(is_open, memory, rule)
        if verdict != "keep":
            is_open = verdict == "open"
            moves.append((step, verdict))
    return moves


RULE = DEFAULTS[C.REWARD_COLLAPSED]
RISE = [0.02 * step for step in range(60)]


def test_a_collapse_opens_once_and_closes_when_half_of_it_is_made_good():
    fall, back = [0.2] * 60, [1.2] * 60
    moves = collapses(RISE + fall + back, RULE)
    assert [verdict for _, verdict in moves] == ["open", "close"]
    assert 60 < moves[0][0] < 80
    assert moves[1][0] > 120


@given(st.lists(st.floats(0, 0.01), min_size=1, max_size=120))
def test_a_reward_that_only_rises_never_collapses(gains):
    level, values = 0.0, []
    for gain in gains:
        level += gain
        values.append(level)
    assert collapses(values, RULE) == []


def test_a_slump_before_anything_was_gained_and_one_lucky_batch_are_no_collapse():
    assert collapses([0.5] * 40 + [0.1] * 40, RULE) == []
    flat = [0.5 + 0.05 * (-1) ** step for step in range(40)]
    assert collapses([*flat, 5.0, *flat], RULE) == []


@given(offset=VALUES, scale=st.floats(0.1, 100))
def test_collapse_is_independent_of_the_rewards_scale(offset, scale):
    course = RISE + [0.2] * 40
    moved = [round(offset) + scale * value for value in course]
    assert [v for _, v in collapses(moved, RULE)] == [v for _, v in collapses(course, RULE)] == ["open"]


@given(silent_s=st.floats(0, 1e6), pace_s=st.one_of(st.none(), st.floats(0, 1e4)))
def test_a_stall_is_both_long_and_many_steps_long(silent_s, pace_s):
    rule = DEFAULTS[C.STALLED]
    opens = policy.stalled(False, silent_s, policy.stall_limit_s(rule, pace_s)) == "open"
    assert opens == (silent_s > (1800 if pace_s is None else max(600, 10 * pace_s)))


@pytest.mark.parametrize(
    ("is_open", "last_at", "step", "verdict"),
    [
        (False, None, 9, "keep"),
        (False, 9, 9, "open"),
        (True, 9, 28, "keep"),
        (True, 9, 29, "close"),
        (True, None, 29, "close"),
        (True, 40, 31, "keep"),  # rolled back beyond it
        (False, 9, 29, "keep"),
    ],
)
def test_not_finite_closes_after_the_window(is_open, last_at, step, verdict):
    assert policy.nonfinite(is_open, last_at, step, DEFAULTS[C.NOT_FINITE]) == verdict


@pytest.mark.parametrize("condition", Condition)
def test_the_defaults_are_within_their_limits_and_bad_numbers_are_not(condition):
    default = DEFAULTS[condition]
    assert policy.rule_error(condition, default) == ""
    if default.threshold is not None:
        for bad in (None, math.nan, math.inf, -1.0, 0.0, 1e9):
            assert policy.rule_error(condition, Rule(True, bad, default.window_steps)) != ""
    if default.window_steps is not None:
        for bad in (None, 0, 1, 501):
            assert policy.rule_error(condition, Rule(True, default.threshold, bad)) != ""
