"""Metrics over HTTP, for `oppo bench telemetry`: ingest rate, and latency of charts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from oppo_bench.telemetry import load as load

if TYPE_CHECKING:
    import httpx

    from oppo_bench.document import Result

METRICS, STEPS = 20, 10_000
LONG = 1_000_000
SPIKES = (17, 250_000, 500_001, 777_777, 999_990)
COMPARED, COMPARED_STEPS = 50, 10_000
LISTED, METRICS_LISTED, ROWS = 10_000, 40, 50
TRACED_STEPS, TRACED_DEVICES = 1000, 8
SAMPLES = 50_000
CROWD = 100_000_000
BUCKETS, BUCKETS_COMPARED = 1000, 300
REWARD = "critic/score/mean"


def _get(client: httpx.Client, path: str, **query: Any) -> httpx.Response:
    answer = client.get(f"/api/v1/{path}", params=query)
    answer.raise_for_status()
    return answer


def _timed(call: Callable[[int], Any], repetitions: int) -> list[float]:
    """Milliseconds of each call after two warm-up calls."""
    taken = []
    for n in range(-2, repetitions):
        start = time.perf_counter()
        call(n)
        if n >= 0:
            taken.append(1e3 * (time.perf_counter() - start))
    return taken


def ingest(client: httpx.Client, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """20 metrics over HTTP in batches of 1,000 steps until the last one can be read; then their size on disk."""
    from oppo_bench.document import Result

    rates, sizes = [], []
    for n in range(max(2, repetitions // 8)):
        columns = {f"walk/{k}": values for k, values in enumerate(load.walks(seed + n, METRICS, STEPS // scale))}
        [run] = load.runs(owner, 1, list(columns), "running")
        attempt, token = load.attempt_token(run)
        bodies = load.batches(columns)
        before = _stored_bytes()
        start = time.perf_counter()
        for body in bodies:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            client.post(f"/api/worker/v1/attempts/{attempt}/events", content=body, headers=headers).raise_for_status()
        response = _get(client, f"runs/{run.pk}/metrics", keys="walk/*", max_points=100).json()["series"]
        taken = time.perf_counter() - start
        assert all(column["step"][-1] == STEPS // scale for column in response.values()), "an ingested point cannot be read"
        assert len(response) == METRICS
        rates.append(METRICS * STEPS // scale / taken)
        _compact(attempt)
        sizes.append((_stored_bytes() - before) / (METRICS * STEPS // scale))
    return [Result.of("ingest_points_per_s", "1/s", rates), Result.of("bytes_per_point", "bytes", sizes)]


def _compact(attempt: int) -> None:
    """Compact like the housekeeper, and vacuum like PostgreSQL does by itself after a while."""
    from django.db import connection

    from oppo_platform.telemetry.compaction import compact

    compact(attempt)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM FULL telemetry_hotpoints")


def _stored_bytes() -> int:
    """Size of the series' tables, with indexes and TOAST."""
    from django.db import connection

    tables = ("telemetry_series", "telemetry_hotpoints", "telemetry_block")
    with connection.cursor() as cursor:
        cursor.execute("SELECT sum(pg_total_relation_size(name::regclass)) FROM unnest(%s::text[]) AS name", [list(tables)])
        return int(cursor.fetchone()[0])


def crowded(client: httpx.Client, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """The long series again, after 100 million points of other runs were ingested."""
    from django.db import connection

    from oppo_bench.document import Result

    metrics, others = 20, CROWD // scale // (LONG // scale) // 20
    for n in range(others):
        click.echo(f"{CROWD // scale:,} points: run {n + 1} of {others} …", err=True)
        columns = {f"walk/{k}": values for k, values in enumerate(load.walks(seed + n, metrics, LONG // scale))}
        [run] = load.runs(owner, 1, list(columns))
        load.keep_history(run.attempts.get(), columns)
    with connection.cursor() as cursor:
        cursor.execute("SELECT sum(points) FROM telemetry_series WHERE key NOT LIKE '@%%'")
        points = int(cursor.fetchone()[0])
    name = "100m" if scale == 1 else "10m"
    return [
        Result.of("points_stored", "points", [points]), Result.of("database_gb", "GB", [_stored_bytes() / 1e9]),
        *long_series(client, owner, scale, repetitions, seed, name),
    ]  # fmt: skip


def long_series(
    client: httpx.Client, owner: load.Tenant, scale: int, repetitions: int, seed: int, name: str = ""
) -> list[Result]:
    """One long series with five spikes of one step each: the whole, and zoomed in step by step."""
    import random

    from oppo_bench.document import Result

    length, spikes = LONG // scale, [place // scale for place in SPIKES]
    values = load.walks(seed, 1, length)[0]
    top = float(round(values.max()) + 10_000)
    values[spikes] = top
    [run] = load.runs(owner, 1, ["walk"])
    load.keep_history(run.attempts.get(), {"walk": values})
    path, chance = f"runs/{run.pk}/metrics", random.Random(seed)

    def overview(_: int) -> Any:
        return _get(client, path, keys="walk", max_points=BUCKETS).json()["series"]["walk"]

    def zoom(n: int) -> Any:
        width = length // (10, 100, 1000)[n % 3]
        first = chance.randrange(length - width)
        return _get(client, path, keys="walk", max_points=BUCKETS, since_step=first, to_step=first + width).json()

    shown = sum(high == top for high in overview(0)["high"])
    taken = {"overview": _timed(overview, repetitions), "zoom": _timed(zoom, 3 * repetitions)}
    spikes = f"spikes_shown_{name}" if name else "spikes_shown"
    name = name or ("1m" if scale == 1 else "100k")
    return [
        Result.of(spikes, "of 5", [shown]),
        *(Result.tail(f"{what}_{name}_ms/p95", "ms", times) for what, times in taken.items()),
        *(Result.of(f"{what}_{name}_ms", "ms", times) for what, times in taken.items()),
    ]


def compare(client: httpx.Client, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """50 runs in one request, as the compare page requests them: curves, time to a target, figures, differing settings."""
    from oppo_bench.document import Result

    compared = load.runs(owner, COMPARED, [REWARD, "timing_s/step"])
    for n, run in enumerate(compared):
        reward, step_s = load.walks(seed + n, 2, COMPARED_STEPS // scale)
        load.keep_history(run.attempts.get(), {REWARD: reward, "timing_s/step": abs(step_s)})
    ids = ",".join(str(run.pk) for run in compared)

    def ask(_: int = 0) -> httpx.Response:
        return _get(client, "compare", runs=ids, keys=REWARD, x="wall", target=5.0, max_points=BUCKETS_COMPARED)

    answer, taken = ask(), _timed(ask, repetitions)
    assert len(answer.json()["series"]) == COMPARED
    name = "50x10k" if scale == 1 else "50x1k"
    return [
        Result.tail(f"compare_{name}_ms/p95", "ms", taken), Result.of(f"compare_{name}_ms", "ms", taken),
        Result.of(f"compare_{name}_kb", "kB", [answer.num_bytes_downloaded / 1e3]),
    ]  # fmt: skip


def runs_table(client: httpx.Client, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """The first page of the runs table, sorted by the reward and by a metric that has no column of its own, in turn."""
    from oppo_bench.document import Result

    others = [f"actor/metric_{n}" for n in range(METRICS_LISTED - 1)]
    load.runs(owner, LISTED // scale, [REWARD, *others])
    names = {"reward": "-reward", "metric": f"-{others[seed % len(others)]}"}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repetitions):
        for name, sort in names.items():
            taken[name] += _timed(lambda _, sort=sort: _get(client, "runs", sort=sort, limit=ROWS), 1)
    size = "10k" if scale == 1 else "1k"
    return [
        Result.tail(f"runs_{size}_ms/p95", "ms", [ms for each in taken.values() for ms in each]),
        *(Result.of(f"runs_{size}_ms/{name}", "ms", each) for name, each in taken.items()),
    ]


def samples(client: httpx.Client, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """A run of 50,000 samples: its page of samples by reward, of a search, and prompts side by side over the steps, in turn."""
    from oppo_bench.document import Result

    [run] = load.runs(owner, 1, [REWARD])
    load.keep_samples(run.attempts.get(), SAMPLES // scale, seed)
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "by_score": (f"runs/{run.pk}/samples", {"sort": "-score", "limit": 20}),
        "search": (f"runs/{run.pk}/samples", {"q": "word7 word11", "limit": 20}),
        "side_by_side": ("compare/samples", {"runs": run.pk, "held_out": False, "limit": 10}),
    }
    taken: dict[str, list[float]] = {name: [] for name in asked}
    for _ in range(repetitions):
        for name, (path, query) in asked.items():
            taken[name] += _timed(lambda _, path=path, query=query: _get(client, path, **query), 1)
    size = "50k" if scale == 1 else "5k"
    return [
        Result.tail(f"samples_{size}_ms/p95", "ms", [ms for each in taken.values() for ms in each]),
        *(Result.of(f"samples_{size}_ms/{name}", "ms", each) for name, each in taken.items()),
    ]


def timeline(client: httpx.Client, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """The timeline of a whole run in one response, merged to at most 5,000 spans."""
    from oppo_bench.document import Result

    steps = TRACED_STEPS // scale
    [run] = load.runs(owner, 1, [REWARD])
    attempt = run.attempts.get()
    load.keep_history(attempt, {REWARD: load.walks(seed, 1, steps)[0]})
    load.keep_timeline(attempt, steps, TRACED_DEVICES)

    def ask(_: int = 0) -> httpx.Response:
        return _get(client, f"runs/{run.pk}/timeline", from_step=1, to_step=steps)

    response = ask()
    pieces = sum(len(step["device"]) + len(step["idle"]) for step in response.json()["steps"])
    taken, name = _timed(ask, repetitions), f"timeline_{steps}x{TRACED_DEVICES}"
    return [
        Result.tail(f"{name}_ms/p95", "ms", taken), Result.of(f"{name}_ms", "ms", taken),
        Result.of(f"{name}_spans", "spans", [pieces]), Result.of(f"{name}_kb", "kB", [response.num_bytes_downloaded / 1e3]),
    ]  # fmt: skip
