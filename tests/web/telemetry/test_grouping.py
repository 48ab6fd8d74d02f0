"""Groups of runs that share a setting, and the interval of how much faster one is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_platform.telemetry.comparison import REWARD, _reached_at, counted
from oppo_platform.telemetry.grouping import ABSENT, BUT_SEED, grouped, mean, speedup

TIMES = st.lists(st.floats(0.01, 1e6), min_size=2, max_size=8)
LEAVES = st.dictionaries(st.sampled_from(["name", "seed", "a.path", "b.path", "steps"]), st.sampled_from("xyz"))


@given(TIMES, TIMES)
def test_the_interval_lies_between_the_extreme_ratios(slow, fast):
    told = speedup(slow, fast)
    assert told["mean"] == pytest.approx(mean(slow) / mean(fast))
    assert min(slow) / max(fast) * (1 - 1e-9) <= told["low"] <= told["high"] <= max(slow) / min(fast) * (1 + 1e-9)
    assert speedup(slow[::-1], fast[::-1]) == told, "the order of runs does not matter"


@given(TIMES, TIMES, st.sampled_from([0.25, 2.0, 1024.0]))
def test_the_unit_of_time_does_not_matter(slow, fast, unit):
    told, same = speedup(slow, fast), speedup([unit * time for time in slow], [unit * time for time in fast])
    assert list(same.values()) == pytest.approx(list(told.values()))


@given(st.floats(0.01, 1e6), st.floats(0.01, 1e6), st.integers(2, 9), st.integers(2, 9))
def test_equal_times_give_an_empty_interval(slow, fast, runs, others):
    told = speedup([slow] * runs, [fast] * others)
    assert list(told.values()) == pytest.approx([slow / fast] * 3)


def test_without_two_runs_on_both_sides_there_is_no_interval():
    assert speedup([4.0], [2.0, 2.0]) == {"mean": 2.0, "low": None, "high": None}
    assert speedup([4.0], []) is None
    assert speedup([0.0], [1.0]) is None


@given(st.lists(LEAVES, min_size=1, max_size=6), st.sampled_from(["seed", "a.path", BUT_SEED]))
def test_every_run_is_in_one_group_with_those_that_have_the_same(leaves, by):
    settings = dict(enumerate(leaves))
    groups = grouped(settings, by)
    assert sorted(run for runs in groups.values() for run in runs) == sorted(settings)
    paths = ["a.path", "b.path", "steps"] if by == BUT_SEED else [by]
    what = {run: tuple(own.get(path, ABSENT) for path in paths) for run, own in settings.items()}
    for runs in groups.values():
        assert len({what[run] for run in runs}) == 1
    assert len(groups) == len(set(what.values()))


def test_group_names_show_the_differing_settings():
    settings = {1: {"a.path": "x", "b.path": "y", "seed": "1"}, 2: {"a.path": "z", "b.path": "z", "seed": "1"}}
    assert grouped(settings, BUT_SEED) == {"a.path x, b.path y": [1], "a.path z, b.path z": [2]}
    assert grouped({1: {"seed": "1"}, 2: {"seed": "2"}}, BUT_SEED) == {"all runs": [1, 2]}
    forked = {1: {"steps": "9"}, 2: {"steps": "9", "fork.run": "1", "fork.step": "4"}}
    assert list(grouped(forked, BUT_SEED)) == ["fork.run –, fork.step –", "fork.run 1, fork.step 4"]


@given(
    st.lists(st.one_of(st.floats(-2, 2), st.just(float("nan"))), min_size=1, max_size=300), st.floats(-1, 1), st.integers(1, 20),
)  # fmt: skip
def test_smoothed_curve_crosses_the_target_at_the_reported_step(values, goal, row):
    """The curve by which the target counts, at rows that each stand for several steps."""
    steps, recorded = np.arange(1, len(values) + 1), np.array(values)
    rows = [int(step) for step in steps if step % row == 0 or step == steps[-1]]
    step = _reached_at((steps, recorded), goal)
    hit = {"step": step, "elapsed_s": None} if step is not None else None
    drawn = counted((steps, recorded), {REWARD: {"step": rows}}, hit)
    assert len(drawn) == len(rows)
    crossed = [at for at, y in zip(rows, drawn, strict=True) if y is not None and y >= goal]
    assert (crossed[:1] != []) == (step is not None)
    if step is not None:
        assert crossed[0] - row < step <= crossed[0]
