"""`oppo bench api`: the ten most frequent API calls with 10,000 runs in the database, through a real web process."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oppo_bench.api.load import RUNS, Dataset, dataset
from oppo_bench.platform_stack import processor_s
from oppo_bench.report import write_results
from oppo_bench.scheduler.command import bench_servers, other_programs
from oppo_bench.tables import show
from oppo_bench.telemetry import load as load
from oppo_bench.telemetry.command import bench_client, bench_web
from oppo_cli.home import Failure, Home

if TYPE_CHECKING:
    import httpx

    from oppo_bench.document import Result

CLIENTS = 8
REPETITIONS, QUICK = 60, 10
WINDOWS, WINDOW_S, QUICK_WINDOW_S = 5, 10.0, 2.0

Call = Callable[["httpx.Client", int], "httpx.Response"]


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON as well.")
@click.option("--quick", is_flag=True, help="A tenth of the runs, fewer repetitions.")
@click.option("--peers", is_flag=True, help="Race MLflow's server instead; installs it the first time.")
def api(json_file: Path | None, quick: bool, peers: bool) -> None:
    """Time the most frequent calls of pages, client and command line, on a real PostgreSQL and Valkey.

    First each call by itself, the ten in turn, over one connection; then eight clients at once that make the ten calls in
    turn, for
    requests per second. Times are those of whole responses. With --peers the calls that MLflow has too, in turn.
    """
    before, kept = other_programs(), Home.from_environment().path / "bench"
    scale, repetitions, window_s = (10, QUICK, QUICK_WINDOW_S) if quick else (1, REPETITIONS, WINDOW_S)
    settings = {
        "runs": RUNS // scale, "clients": CLIENTS, "repetitions": repetitions, "windows": WINDOWS, "window_s": window_s,
    }  # fmt: skip
    results: list[Result] = []
    with bench_servers(), bench_web() as (base_url, web):
        click.echo(f"{RUNS // scale:,} runs …", err=True)
        owner = load.create_tenant()
        there = dataset(owner, scale)
        calls = calls_on(there)
        with bench_client(base_url, owner.token) as client:
            if peers:
                results += _race(client, calls, there, kept, scale, repetitions)
            else:
                click.echo("one client …", err=True)
                results += sequential_latency(client, calls, repetitions)
        write_results("api", before, settings, results, json_file)
        if not peers:
            click.echo(f"{CLIENTS} clients …", err=True)
            results += concurrent_load(base_url, web, owner.token, calls, window_s)
            write_results("api", before, settings, results, json_file)
    show("API", results)
    for when, machine in {"before": before, "after": other_programs()}.items():
        click.echo(f"Load {when}: {machine.load:.2f}; other programs used {machine.other_cores or 0.0:.2f} cores {when}.")


def calls_on(there: Dataset) -> dict[str, Call]:
    """The ten calls by operation id; the number selects one of the runs with much data."""

    def of_a_run(path: str, **query: Any) -> Call:
        return lambda client, n: _get(client, f"runs/{there.detailed[n % len(there.detailed)]}{path}", **query)

    compared = ",".join(map(str, there.detailed[:5]))
    return {
        "list_runs": lambda client, n: _get(client, "runs", sort=("-reward", "")[n % 2], limit=50),
        "show_run": of_a_run(""),
        "show_metrics": of_a_run("/metrics", keys="critic/score/mean,timing_s/step", max_points=1000),
        "show_timeline": of_a_run("/timeline", from_step=1, to_step=20),
        "list_samples": of_a_run("/samples", sort="-score", limit=20),
        "show_logs": of_a_run("/logs", limit=1000),
        "list_events": of_a_run("/events", limit=100),
        "compare_runs": lambda client, n: _get(client, "compare", runs=compared, keys="critic/score/mean", max_points=300),
        "show_queue": lambda client, n: _get(client, "queue"),
        "submit_run": lambda client, n: _checked(client.post("/api/v1/runs", json={"spec": there.spec})),
    }


def _race(client: httpx.Client, calls: dict[str, Call], there: Dataset, kept: Path, scale: int, repetitions: int) -> list[Result]:
    """Ours and MLflow's, in turn. Raises Failure."""
    from oppo_bench.api.race import mlflow_calls, race_calls
    from oppo_bench.telemetry.peer_trackers.mlflow import mlflow_server
    from oppo_bench.telemetry.peer_trackers.tracker import TrackerError

    try:
        with mlflow_server(kept, lambda text: click.echo(f"{text} …", err=True)) as server:
            click.echo("as many runs for MLflow …", err=True)
            return race_calls(client, calls, mlflow_calls(server, there, scale), repetitions)
    except TrackerError as error:
        raise Failure(str(error)) from error


def _get(client: httpx.Client, path: str, **query: Any) -> httpx.Response:
    return _checked(client.get(f"/api/v1/{path}", params=query))


def _checked(answer: httpx.Response) -> httpx.Response:
    return answer.raise_for_status()


def sequential_latency(client: httpx.Client, calls: dict[str, Call], repetitions: int) -> list[Result]:
    """Each call by one client, in turn, without the first two rounds."""
    from oppo_bench.document import Result

    taken: dict[str, list[float]] = defaultdict(list)
    for n in range(-2, repetitions):
        for name, call in calls.items():
            start = time.perf_counter()
            call(client, n)
            if n >= 0:
                taken[name].append(1e3 * (time.perf_counter() - start))
    return [
        *(Result.tail(f"{name}_ms/p95", "ms", times) for name, times in taken.items()),
        *(Result.of(f"{name}_ms", "ms", times) for name, times in taken.items()),
    ]


def concurrent_load(base_url: str, web: int, token: str, calls: dict[str, Call], window_s: float) -> list[Result]:
    """Requests per second of several clients at once by window, and the duration and processor time of a request.

    `web`: the web process's id.
    """
    from oppo_bench.document import Result

    rates, taken, used, own = [], list[float](), processor_s({web: "web"}), time.process_time()
    for _ in range(WINDOWS):
        window = _window(base_url, token, calls, window_s)
        rates.append(len(window) / window_s)
        taken += window
    spent = {part: seconds - used[part] for part, seconds in processor_s({web: "web"}).items()}
    spent["clients"] = time.process_time() - own
    return [
        Result.of("requests_per_s", "1/s", rates),
        *(Result.of(f"request_cpu_ms/{part}", "ms", [1e3 * seconds / len(taken)]) for part, seconds in spent.items()),
        Result.tail("together_ms/p95", "ms", taken),
        Result.of("together_ms", "ms", taken),
    ]


def _window(base_url: str, token: str, calls: dict[str, Call], window_s: float) -> list[float]:
    """Milliseconds of every request that ended within the window. Raises a client's error."""
    taken, faults, start = list[float](), list[Exception](), threading.Barrier(CLIENTS)
    ways = list(calls.values())

    def one(number: int) -> None:
        try:
            with bench_client(base_url, token) as client:
                _get(client, "me")  # connected before the window begins
                start.wait()
                _ask_until(time.perf_counter() + window_s, client, ways[number:] + ways[:number], taken)
        except Exception as error:  # noqa: BLE001 - told by the thread that waits for all
            start.abort()
            faults.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fault in faults:
        if not isinstance(fault, threading.BrokenBarrierError):
            raise fault
    return taken


def _ask_until(end: float, client: httpx.Client, ways: list[Call], taken: list[float]) -> None:
    """Send calls in turn until the window ends; the last request, which ends after it, does not count."""
    n = 0
    while (begun := time.perf_counter()) < end:
        ways[n % len(ways)](client, n)
        done = time.perf_counter()
        if done <= end:
            taken.append(1e3 * (done - begun))
        n += 1
