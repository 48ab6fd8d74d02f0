"""`oppo bench telemetry`: how fast points come in, and how soon their picture is there, through a real web process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oppo_cli import telemetry_load as load
from oppo_cli.bench_pages import event_to_pixel, first_chart
from oppo_cli.bench_report import keep
from oppo_cli.bench_scheduler import bench_servers, other_programs
from oppo_cli.bench_tables import show
from oppo_cli.home import Failure

if TYPE_CHECKING:
    import httpx

    from oppo_bench.document import Result

METRICS, STEPS = 20, 10_000
LONG = 1_000_000
SPIKES = (17, 250_000, 500_001, 777_777, 999_990)
COMPARED, COMPARED_STEPS = 50, 10_000
LISTED, METRICS_LISTED, ROWS = 10_000, 40, 50
TRACED_STEPS, TRACED_DEVICES = 1000, 8
BUCKETS, BUCKETS_COMPARED = 1000, 300
REPETITIONS, QUICK = 40, 8
WEB_WITHIN_S = 30.0
REWARD = "critic/score/mean"


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON as well.")
@click.option("--quick", is_flag=True, help="A tenth of the points, fewer repetitions.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of the random walks.")
def telemetry(json_file: Path | None, quick: bool, seed: int) -> None:
    """Time ingest and reading of metrics over HTTP, on a real PostgreSQL.

    Values are random walks in float64. Ingest ends when every point can be read; bytes a point include indexes and pyramid.
    Times of reading are those of whole replies, one at a time, over one connection.
    """
    before, results = other_programs(), []
    scale, repetitions = (10, QUICK) if quick else (1, REPETITIONS)
    settings = {
        "seed": seed, "metrics": METRICS, "steps": STEPS // scale, "long": LONG // scale, "compared": COMPARED,
        "compared_steps": COMPARED_STEPS // scale, "buckets": BUCKETS, "buckets_compared": BUCKETS_COMPARED,
        "listed": LISTED // scale, "metrics_listed": METRICS_LISTED, "rows": ROWS,
        "traced_steps": TRACED_STEPS // scale, "traced_devices": TRACED_DEVICES,
        "repetitions": repetitions,
    }  # fmt: skip
    with bench_servers():
        click.echo("event to pixel …", err=True)
        results += event_to_pixel()
        with _web() as base_url:
            owner = load.tenant()
            with _client(base_url, owner.token) as client:
                for measure in (_ingest, _long, _compare, _runs_table, _timeline):
                    click.echo(f"{measure.__name__[1:].replace('_', ' ')} …", err=True)
                    results += measure(client, owner, scale, repetitions, seed)
                    keep("telemetry", before, settings, results, json_file)
            click.echo("first chart …", err=True)
            results += first_chart(base_url, owner, scale, max(3, repetitions // 4), seed)
            keep("telemetry", before, settings, results, json_file)
    show("Telemetry", results)
    for when, machine in {"before": before, "after": other_programs()}.items():
        click.echo(
            f"Load {when}: {machine.load:.2f}; other programs used {machine.other_cores or 0.0:.2f} cores for a moment {when}."
        )


@contextmanager
def _web() -> Iterator[str]:
    """A web process as production has it."""
    from django.core.management import call_command

    from oppo_platform.embedded.ports import LOOPBACK, remembered_port

    call_command("buildstatic", verbosity=0)
    port = remembered_port(Path(os.environ["OPPO_HOME"]), "web")
    environ = {**os.environ, "OPPO_BASE_URL": f"http://{LOOPBACK}:{port}", "OPPO_LOG_FORMAT": "json"}
    process = subprocess.Popen([sys.executable, "-m", "oppo_cli", "web", "--port", str(port)], env=environ)
    try:
        _wait_for_web(environ["OPPO_BASE_URL"], process)
        yield environ["OPPO_BASE_URL"]
    finally:
        process.terminate()
        process.wait(timeout=WEB_WITHIN_S)


def _wait_for_web(base_url: str, process: subprocess.Popen[bytes]) -> None:
    import httpx

    deadline = time.monotonic() + WEB_WITHIN_S
    while True:
        try:
            if httpx.get(f"{base_url}/healthz").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        if process.poll() is not None or time.monotonic() > deadline:
            raise Failure("The web process did not start.")
        time.sleep(0.05)


@contextmanager
def _client(base_url: str, token: str) -> Iterator[httpx.Client]:
    import httpx

    headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "br, gzip"}
    with httpx.Client(base_url=base_url, headers=headers, timeout=60.0) as client:
        yield client


def _get(client: httpx.Client, path: str, **query: Any) -> httpx.Response:
    answer = client.get(f"/api/v1/{path}", params=query)
    answer.raise_for_status()
    return answer


def _timed(call: Callable[[int], Any], repetitions: int) -> list[float]:
    """Milliseconds of each call; two more before them are left out."""
    taken = []
    for n in range(-2, repetitions):
        start = time.perf_counter()
        call(n)
        if n >= 0:
            taken.append(1e3 * (time.perf_counter() - start))
    return taken


def _ingest(client: httpx.Client, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """20 metrics over HTTP in batches of 1,000 steps, until the last one can be read; then what they take on disk."""
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
        told = _get(client, f"runs/{run.pk}/metrics", keys="walk/*", max_points=100).json()["series"]
        taken = time.perf_counter() - start
        assert all(column["step"][-1] == STEPS // scale for column in told.values()), "a point that was told cannot be read"
        assert len(told) == METRICS
        rates.append(METRICS * STEPS // scale / taken)
        _seal(attempt)
        sizes.append((_stored_bytes() - before) / (METRICS * STEPS // scale))
    return [Result.of("ingest_points_per_s", "1/s", rates), Result.of("bytes_per_point", "bytes", sizes)]


def _seal(attempt: int) -> None:
    """As the housekeeper does, and what PostgreSQL does by itself after a while."""
    from django.db import connection

    from oppo_platform.telemetry.sealing import seal

    seal(attempt)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM FULL telemetry_hotpoints")


def _stored_bytes() -> int:
    """Of the series' tables, with indexes and what lies outside their rows."""
    from django.db import connection

    tables = ("telemetry_series", "telemetry_hotpoints", "telemetry_block")
    with connection.cursor() as cursor:
        cursor.execute("SELECT sum(pg_total_relation_size(name::regclass)) FROM unnest(%s::text[]) AS name", [list(tables)])
        return int(cursor.fetchone()[0])


def _long(client: httpx.Client, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """One long series with five spikes of one step each: as a whole, and nearer and nearer."""
    import random

    from oppo_bench.document import Result

    length, spikes = LONG // scale, [place // scale for place in SPIKES]
    values = load.walks(seed, 1, length)[0]
    top = float(round(values.max()) + 10_000)
    values[spikes] = top
    [run] = load.runs(owner, 1, ["walk"])
    load.keep_history(run.attempts.get(), {"walk": values})
    path, chance = f"runs/{run.pk}/metrics", random.Random(seed)  # noqa: S311 - repeatable, and no secret

    def overview(_: int) -> Any:
        return _get(client, path, keys="walk", max_points=BUCKETS).json()["series"]["walk"]

    def zoom(n: int) -> Any:
        width = length // (10, 100, 1000)[n % 3]
        first = chance.randrange(length - width)
        return _get(client, path, keys="walk", max_points=BUCKETS, since_step=first, to_step=first + width).json()

    shown = sum(high == top for high in overview(0)["high"])
    taken = {"overview": _timed(overview, repetitions), "zoom": _timed(zoom, 3 * repetitions)}
    name = "1m" if scale == 1 else "100k"
    return [
        Result.of("spikes_shown", "of 5", [shown]),
        *(Result.tail(f"{what}_{name}_ms/p95", "ms", times) for what, times in taken.items()),
        *(Result.of(f"{what}_{name}_ms", "ms", times) for what, times in taken.items()),
    ]


def _compare(client: httpx.Client, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """50 runs in one request, as the compare page asks for them: curves, time to a target, figures, settings that differ."""
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


def _runs_table(client: httpx.Client, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
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


def _timeline(client: httpx.Client, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """The timeline of a whole run in one reply, merged to at most 5,000 spans."""
    from oppo_bench.document import Result

    steps = TRACED_STEPS // scale
    [run] = load.runs(owner, 1, [REWARD])
    attempt = run.attempts.get()
    load.keep_history(attempt, {REWARD: load.walks(seed, 1, steps)[0]})
    load.keep_timeline(attempt, steps, TRACED_DEVICES)

    def ask(_: int = 0) -> httpx.Response:
        return _get(client, f"runs/{run.pk}/timeline", from_step=1, to_step=steps)

    told = ask()
    pieces = sum(len(step["device"]) + len(step["idle"]) for step in told.json()["steps"])
    taken, name = _timed(ask, repetitions), f"timeline_{steps}x{TRACED_DEVICES}"
    return [
        Result.tail(f"{name}_ms/p95", "ms", taken), Result.of(f"{name}_ms", "ms", taken),
        Result.of(f"{name}_spans", "spans", [pieces]), Result.of(f"{name}_kb", "kB", [told.num_bytes_downloaded / 1e3]),
    ]  # fmt: skip
