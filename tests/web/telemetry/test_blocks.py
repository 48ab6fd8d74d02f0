"""The pyramid of a series says of its points what looking at each of them says."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_platform.telemetry import blocks
from oppo_platform.telemetry.comparison import smoothed

ODD = st.sampled_from([math.nan, math.inf, -math.inf])
TINY = 1e-310  # of numbers that small the mean is not exact
VALUES = st.lists(st.one_of(st.floats(allow_nan=False, allow_infinity=False), ODD), min_size=1, max_size=700)


def sorted_steps(values, gaps):
    """Ascending steps, with gaps of one or, drawn, of more."""
    return np.cumsum([1 + gaps[i % len(gaps)] for i in range(len(values))]).astype(np.int32)


def told(steps, values):
    """A bucket of these points, by looking at each."""
    finite = [v for v in values if math.isfinite(v)]
    near = (
        {"low": min(finite), "high": max(finite), "end": finite[-1]}
        if finite
        else dict.fromkeys(("low", "high", "end"), math.nan)
    )
    return {"first": steps[0], "last": steps[-1], "count": len(values), "broken": len(values) - len(finite), **near}


def assert_tells(bucket, steps, values):
    for column, wanted in told(steps, values).items():
        assert bucket[column] == wanted or (math.isnan(bucket[column]) and math.isnan(wanted)), column
    finite = [v for v in values if math.isfinite(v)]
    if finite:
        half = math.fsum(v / len(finite) / 2 for v in finite)  # a sum of the values themselves may be more than a float can hold
        assert abs(bucket["mean"] / 2 - half) <= 1e-9 * max(map(abs, finite)) + TINY
        assert bucket["low"] <= bucket["mean"] <= bucket["high"]
    else:
        assert math.isnan(bucket["mean"])


@settings(deadline=None, max_examples=60)
@given(VALUES, st.lists(st.sampled_from([0, 0, 0, 1, 7]), min_size=1, max_size=9))
def test_every_level_equals_brute_force(values, gaps):
    steps, values = sorted_steps(values, gaps), np.array(values)
    for buckets, size in zip(blocks.pyramid(steps, values), (blocks.FINE, blocks.COARSE, len(values)), strict=True):
        assert len(buckets) == -(-len(values) // size)
        for i, bucket in enumerate(buckets):
            part = slice(i * size, (i + 1) * size)
            assert_tells(bucket, steps[part], values[part])


def test_the_mean_of_the_largest_numbers_is_one_of_them():
    most = np.finfo(np.float64).max
    for values, mean in (([most] * 5000, most), ([-most] * 5000, -most), ([most, -most] * 2500, 0.0), ([1, 2, 3], 2.0)):
        assert blocks.pyramid(np.arange(len(values), dtype=np.int32), np.array(values, float))[-1]["mean"] == [mean]


@settings(deadline=None, max_examples=60)
@given(VALUES, st.integers(1, 200))
def test_thinning_covers_every_point_once(values, most):
    steps, values = np.arange(1, len(values) + 1, dtype=np.int32), np.array(values)
    shown = blocks.downsample(blocks.as_buckets(steps, values), most)
    assert len(shown) == min(most, len(values))
    assert shown["count"].sum() == len(values)
    for bucket in shown:
        part = slice(bucket["first"] - 1, bucket["last"])
        assert_tells(bucket, steps[part], values[part])


@given(VALUES, st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_packing_round_trip(values, gaps):
    steps, values = sorted_steps(values, gaps), np.array(values)
    for packed in (
        blocks.unpack_points(blocks.pack_points(steps, values)),
        blocks.unpack_block(int(steps[0]), *blocks.pack_block(steps, values)),
    ):
        np.testing.assert_array_equal(packed[0], steps)
        np.testing.assert_array_equal(packed[1], values)
    if len(set(np.diff(steps))) <= 1:
        assert len(blocks.pack_block(steps, values)[1]) == 8 * len(values)


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(allow_nan=False)), min_size=1))
def test_last_point_of_a_repeated_step_counts(points):
    steps, values = blocks.sort_by_step(np.array([s for s, _ in points], np.int32), np.array([v for _, v in points]))
    assert dict(zip(steps.tolist(), values.tolist(), strict=True)) == dict(points)
    assert steps.tolist() == sorted({s for s, _ in points})


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_smoothing_equals_the_recurrence(values):
    mean, wanted = values[0], []
    for value in values:
        mean = 0.1 * value + 0.9 * mean
        wanted.append(mean)
    np.testing.assert_allclose(smoothed(np.array(values), 0.1), wanted, rtol=1e-9, atol=1e-3)
