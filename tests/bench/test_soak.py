"""Statistics and verdict of `bench/soak.py`."""

from __future__ import annotations

import random

from oppo_bench.soak.verdict import FEWEST_CALLS, DatabaseSize, History, call_trend, complaints, fit

HOURS = [n / 360 for n in range(721)]  # two hours, every ten seconds
NOISE = random.Random(0)
FITTING = DatabaseSize(grown=50.0, counted=45.0)


def history(**per_hour: float) -> History:
    """Memory of roles, 100 MiB with noise, that grows by so much per hour after a steep start."""
    kept = History()
    for hour in HOURS:
        start = 40 * min(1.0, hour / 0.4)
        kept.add(hour, {(role, "mib"): 100 + start + rate * hour + NOISE.gauss(0, 2) for role, rate in per_hour.items()})
    return kept


def test_the_slope_of_a_line_is_exact() -> None:
    slope = fit(HOURS, [3 + 7 * hour for hour in HOURS])
    assert abs(slope.per_hour - 7) < 1e-9
    assert slope.error < 1e-6
    assert fit(HOURS, [12.0] * len(HOURS)).per_hour == 0


def test_the_standard_error_covers_independent_and_similar_noise() -> None:
    def t_value(alike: float) -> float:
        values, noise = [], 0.0
        for hour in HOURS:
            noise = alike * noise + NOISE.gauss(0, 1)
            values.append(5 * hour + noise)
        slope = fit(HOURS, values)
        return (slope.per_hour - 5) / slope.error

    for alike in (0.0, 0.9):
        tries = [t_value(alike) for _ in range(60)]
        assert sum(abs(t) < 2 for t in tries) >= 50, alike


def test_growth_above_the_bound_is_told_and_a_warm_up_is_not() -> None:
    trends = history(web=0.0, scheduler=1.0, agent=20.0).trends()
    assert {trend.role: trend.flat for trend in trends} == {"web": True, "scheduler": True, "agent": False}
    [line] = complaints(trends, [], FITTING, [])
    assert line.startswith("agent: mib grow by ")


def test_leaks_of_descriptors_are_told_but_not_postgresqls_open_files() -> None:
    kept = History()
    for hour in HOURS:
        kept.add(hour, {(role, "descriptors"): 20 + round(30 * hour) for role in ("web", "database")})
    assert {trend.role: trend.flat for trend in kept.trends()} == {"web": False, "database": True}


def test_a_role_that_comes_and_goes_is_judged_while_it_is_there() -> None:
    kept = History()
    for n, hour in enumerate(HOURS):
        kept.add(hour, {("attempts", "mib"): 300.0} if n % 3 else {})
    [trend] = kept.trends()
    assert (trend.first, trend.last, trend.flat) == (300.0, 300.0, True)


def test_slower_calls_are_told_if_there_are_enough_of_them() -> None:
    def trend(rise: float, every: int = 4) -> bool:
        return call_trend("show_run", [(hour, 20 * (1 + rise * hour)) for hour in HOURS[::every]], 2.0).flat

    assert trend(0.05)
    assert not trend(0.5)
    assert trend(0.5, every=len(HOURS) // FEWEST_CALLS), "ten calls in a quarter say nothing"
    assert call_trend("show_run", [(hour, 1 + hour) for hour in HOURS], 2.0).flat, "two milliseconds are noise"


def test_the_database_may_differ_from_what_was_counted_by_a_half() -> None:
    assert DatabaseSize(60.0, 45.0).as_counted
    assert not DatabaseSize(90.0, 45.0).as_counted
    assert DatabaseSize(2.0, 0.5).as_counted, "too little to say"
    assert complaints([], [], DatabaseSize(90.0, 45.0), ["web was restarted"]) == [
        "the runs' tables grew by 90.0 MiB, the platform counted 45.0",
        "web was restarted",
    ]
