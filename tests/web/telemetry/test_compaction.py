"""Whatever is sealed when, a series reads as it was told: no point lost, doubled or out of date, from far and from near."""

import math
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from oppo_platform.api.logs import LogLineItem
from oppo_platform.runs.models import Attempt, AttemptState, Run
from oppo_platform.telemetry import blocks, compaction, metric_reader, selectors
from oppo_platform.telemetry.logs import logs
from oppo_platform.telemetry.metric_reader import Range, attempt_ranges, read_buckets, read_points
from oppo_platform.telemetry.models import Block, HotPoints, ProducerMark, Series

HYPOTHESIS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def attempt(world):
    _, attempt_id = world.start(world.worker())
    Attempt.objects.filter(pk=attempt_id).update(first_step=1)
    return Attempt.objects.select_related("run").get(pk=attempt_id)


def tell(attempt, first_step, values, key="m"):
    """Points of consecutive steps, as one batch brings them."""
    series, _ = Series.objects.get_or_create(attempt=attempt, key=key)
    steps = np.arange(first_step, first_step + len(values), dtype=np.int32)
    HotPoints.objects.create(
        series=series, first_step=first_step, last_step=int(steps[-1]), data=blocks.pack_points(steps, np.asarray(values, float))
    )
    return zip(steps.tolist(), np.asarray(values, float).tolist(), strict=True)


def read(attempt, within=metric_reader.EVERYTHING, most=None, key="m"):
    parts = {attempt.run_id: attempt_ranges(attempt.run)}
    if most is None:
        steps, values = read_points(parts, [key], within).get((attempt.run_id, key), (np.empty(0), np.empty(0)))
        return dict(zip(steps.tolist(), values.tolist(), strict=True))
    return read_buckets(parts, [key], within, most).get((attempt.run_id, key), np.empty(0, blocks.BUCKET))


def assert_reads_as(attempt, log, within, most):
    steps = np.array(sorted(step for step in log if within.after < step <= within.until))
    values = np.array([log[step] for step in steps.tolist()])
    inside = dict(zip(steps.tolist(), values.tolist(), strict=True))
    assert read(attempt, within) == inside
    buckets = read(attempt, within, most)
    assert len(buckets) <= most
    assert (buckets["first"][1:] > buckets["last"][:-1]).all()
    assert buckets["count"].sum() == len(inside)
    for bucket in buckets:
        of_it = values[slice(*np.searchsorted(steps, [bucket["first"], bucket["last"] + 1]))]
        assert (bucket["count"], bucket["low"], bucket["high"], bucket["end"]) == (
            len(of_it),
            of_it.min(),
            of_it.max(),
            of_it[-1],
        )
        assert math.isclose(bucket["mean"], of_it.mean(), rel_tol=1e-9, abs_tol=1e-9)


# (steps back from the end, how many points, seal afterwards)
TELLINGS = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 3, 700, 5000]), st.sampled_from([1, 40, 900, 4096, 6000]), st.booleans()),
    min_size=1,
    max_size=7,
)


@HYPOTHESIS
@given(TELLINGS, st.integers(0, 12_000), st.integers(1, 12_000), st.sampled_from([1, 10, 120, 1500]), st.integers(0, 2**31))
def test_series_reads_back_as_reported(attempt, tellings, after, length, most, seed):
    Series.objects.all().delete()
    draw, log, last = np.random.default_rng(seed), {}, 0
    for back, count, seals in tellings:
        first = max(1, last - back + 1)
        log |= dict(tell(attempt, first, draw.normal(size=count)))
        last = max(log)
        if seals:
            compaction.compact(attempt.pk)
    assert_reads_as(attempt, log, Range(), most)
    assert_reads_as(attempt, log, Range(after, after + length), most)
    compaction.compact(attempt.pk)
    assert not HotPoints.objects.exists()
    assert sorted(Block.objects.values_list("count", flat=True))[:-1].count(4096) >= Block.objects.count() - 2 - len(tellings)
    assert_reads_as(attempt, log, Range(after, after + length), most)
    series = Series.objects.get()
    assert (series.points, series.first_step, series.last_step) == (len(log), 1, last)


def test_spikes_are_visible_at_every_zoom_level(attempt):
    values = np.random.default_rng(0).normal(size=100_000)
    places = (17, 25_000, 50_001, 77_777, 99_990)
    values[list(places)] = 99.0
    for start in range(0, 100_000, 10_000):
        tell(attempt, start + 1, values[start : start + 10_000])
    compaction.compact(attempt.pk)
    for within in (Range(), Range(16, 17 + 1), Range(20_000, 30_000), Range(77_000, 78_000)):
        inside = [place + 1 for place in places if within.after < place + 1 <= within.until]
        for most in (50, 1000, 20_000):
            buckets = read(attempt, within, most)
            assert (buckets["high"] == 99.0).sum() == len(inside)


def test_nonfinite_values_leave_a_gap(attempt):
    values = np.zeros(10_000)
    values[5_000], values[7_000] = math.nan, math.inf
    tell(attempt, 1, values)
    compaction.compact(attempt.pk)
    Run.objects.update(latest={"m": 0.0})
    attempt.run.refresh_from_db()
    column = selectors.metrics(attempt.run, ["m"], max_points=100)["series"]["m"]
    assert [y for y in column["y"] if y is None] == [None, None]
    assert set(column["low"]) == set(column["high"]) == {0.0}


def test_steps_repeated_by_a_newer_attempt_are_cut_out_of_blocks(attempt):
    tell(attempt, 1, np.zeros(10_000))
    compaction.compact(attempt.pk)
    facts = {"node": attempt.node, "created_at": attempt.created_at, "lease_expires_at": attempt.lease_expires_at}
    newer = Attempt.objects.create(run=attempt.run, epoch=2, first_step=6_001, state=AttemptState.ENDED, **facts)
    tell(newer, 6_001, np.ones(5_000))
    for seals in (False, True):
        if seals:
            compaction.compact(newer.pk)
        buckets = read(attempt, Range(), 40)
        assert buckets["count"].sum() == 11_000
        assert {(b["low"], b["high"]) for b in buckets if b["last"] <= 6_000 or b["first"] > 6_000} == {(0, 0), (1, 1)}
        assert read(attempt) == {step: float(step > 6_000) for step in range(1, 11_001)}


def test_concurrent_reads_compaction_and_ingest(attempt, at_once):
    """Readers see an unbroken beginning at every moment, and two sealers do not meet."""
    Series.objects.create(attempt=attempt, key="m")
    done = threading.Event()

    def teller():
        for start in range(1, 8001, 200):
            tell(attempt, start, np.arange(start, start + 200))
        done.set()

    def sealer():
        while not done.is_set():
            compaction.compact(attempt.pk)

    def reader(most):
        def look():
            seen = 0
            while not done.is_set():
                if most is None:
                    points = read(attempt)
                    count, ordered = len(points), list(points.items()) == [(i, float(i)) for i in range(1, len(points) + 1)]
                else:
                    buckets = read(attempt, Range(), most)
                    count = int(buckets["count"].sum())
                    ordered = count == 0 or (buckets["first"][0], buckets["last"][-1]) == (1, count)
                assert ordered
                assert count >= seen
                seen = count

        return look

    assert at_once(teller, sealer, sealer, reader(None), reader(5)) == [None] * 5
    compaction.compact(attempt.pk)
    assert read(attempt) == {i: float(i) for i in range(1, 8001)}
    assert Series.objects.get().points == sum(Block.objects.values_list("count", flat=True)) == 8000


def test_attempt_is_compacted_with_enough_hot_points_and_at_its_end(attempt, settings):
    settings.OPPO_SEAL_EVENTS = 100
    mark = ProducerMark.objects.create(attempt=attempt, producer="engine", high_water=99)
    tell(attempt, 1, [1.0])
    assert compaction.attempts_to_compact() == []
    ProducerMark.objects.update(high_water=100)
    assert compaction.attempts_to_compact() == [attempt.pk]
    assert compaction.compact(attempt.pk) == 1
    assert compaction.attempts_to_compact() == []
    tell(attempt, 2, [2.0])
    ProducerMark.objects.update(high_water=101)
    assert compaction.attempts_to_compact() == []
    Attempt.objects.update(state=AttemptState.ENDED)
    assert compaction.attempts_to_compact() == [attempt.pk]
    compaction.compact(attempt.pk)
    mark.refresh_from_db()
    assert (mark.sealed, compaction.attempts_to_compact()) == (101, [])


def test_metrics_beyond_the_limit_are_dropped_and_logged(world, events, settings):
    settings.OPPO_MOST_SERIES = 3
    worker = world.worker()
    run, attempt_id = world.start(worker)
    worker.send_events(attempt_id, [events.step(1, 1, a=1.0, b=1.0)])
    worker.send_events(attempt_id, [events.step(2, 2, a=1.0, c=1.0, d=1.0, e=1.0), events.step(3, 3, d=1.0)])
    kept = set(Series.objects.exclude(key__startswith="@").values_list("key", flat=True))
    assert kept == {"a", "b", "c"}
    run.refresh_from_db()
    assert run.latest.keys() == kept, "neither lists nor the stream hold more"
    lines = [line["text"] for line in logs(run)["lines"]]
    assert len(lines) == 1
    assert "OPPO_MOST_SERIES" in lines[0]
    assert "such as d" in lines[0]
    assert logs(run, stream="platform")["lines"] == logs(run)["lines"]
    (line,) = logs(run)["lines"]
    assert TypeAdapter(LogLineItem).validate_python(line)["stream"] == "platform"
