"""`oppo bench telemetry`: ingest rate and chart latency through a real web process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oppo_bench.report import write_results
from oppo_bench.scheduler.command import bench_servers, other_programs
from oppo_bench.tables import show
from oppo_bench.telemetry import load as load
from oppo_bench.telemetry.frames import timeline_frames
from oppo_bench.telemetry.pages import compare_cold, event_to_pixel, first_chart, many_metrics
from oppo_bench.telemetry.peers import race
from oppo_bench.telemetry.series import (
    BUCKETS,
    BUCKETS_COMPARED,
    COMPARED,
    COMPARED_STEPS,
    LISTED,
    LONG,
    METRICS,
    METRICS_LISTED,
    ROWS,
    STEPS,
    TRACED_DEVICES,
    TRACED_STEPS,
    compare,
    crowded,
    ingest,
    long_series,
    runs_table,
    samples,
    timeline,
)  # fmt: skip
from oppo_bench.telemetry.streams import open_streams
from oppo_cli.home import Failure, Home, Refusal

if TYPE_CHECKING:
    import httpx

    from oppo_bench.document import Result

LOGGED_STEPS = 40
REPETITIONS, QUICK = 40, 8
# One token sends all requests: its requests are counted but never rate limited.
RATE = 1_000_000_000
WEB_WITHIN_S = 30.0


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON as well.")
@click.option("--quick", is_flag=True, help="A tenth of the points, fewer repetitions.")
@click.option("--full", is_flag=True, help="Look at the long series once more with 100,000,000 points in the database.")
@click.option("--peers", is_flag=True, help="Race MLflow, trackio and TensorBoard instead; installs them the first time.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of the random walks.")
def telemetry(json_file: Path | None, quick: bool, full: bool, peers: bool, seed: int) -> None:
    """Time ingest and queries of metrics over HTTP, on a real PostgreSQL.

    Values are random walks in float64. Ingest ends when every point can be read; bytes per point include indexes and
    pyramid.
    Query times are those of whole responses, one at a time, over one connection.
    """
    if full and peers:
        raise Refusal("--full and --peers measure different things: choose one.")
    before, kept = other_programs(), Home.from_environment().path / "bench"
    results: list[Result] = []
    scale, repetitions = (10, QUICK) if quick else (1, REPETITIONS)
    settings = {
        "seed": seed, "metrics": METRICS, "steps": STEPS // scale, "long": LONG // scale, "compared": COMPARED,
        "compared_steps": COMPARED_STEPS // scale, "buckets": BUCKETS, "buckets_compared": BUCKETS_COMPARED,
        "listed": LISTED // scale, "metrics_listed": METRICS_LISTED, "rows": ROWS,
        "traced_steps": TRACED_STEPS // scale, "traced_devices": TRACED_DEVICES,
        "repetitions": repetitions,
    }  # fmt: skip
    with bench_servers():
        for measured in _race(kept, scale, seed) if peers else _measure_ours(scale, repetitions, seed, full):
            results += measured
            write_results("telemetry", before, settings, results, json_file)
    show("Telemetry", results)
    for when, machine in {"before": before, "after": other_programs()}.items():
        click.echo(
            f"Load {when}: {machine.load:.2f}; other programs used {machine.other_cores or 0.0:.2f} cores for a moment {when}."
        )


def _tell(text: str) -> None:
    click.echo(f"{text} …", err=True)


def _measure_ours(scale: int, repetitions: int, seed: int, full: bool) -> Iterator[list[Result]]:
    """Our figures alone."""
    _tell("logging")
    yield _logging(LOGGED_STEPS // (1 if scale == 1 else 4))
    _tell("event to pixel")
    yield event_to_pixel()
    with bench_web() as (base_url, web_pid):
        owner = load.create_tenant()
        with bench_client(base_url, owner.token) as client:
            for measure in (ingest, long_series, compare, runs_table, samples, timeline):
                _tell(measure.__name__.replace("_", " "))
                yield measure(client, owner, scale, repetitions, seed)
        _tell("open streams")
        yield open_streams(base_url, owner, web_pid, scale)
        _tell("first chart")
        yield first_chart(base_url, owner, scale, max(3, repetitions // 4), seed)
        for measure_page in (many_metrics, compare_cold):
            _tell(measure_page.__name__.replace("_", " "))
            yield measure_page(base_url, owner, scale, max(3, repetitions // 8), seed)
        _tell("timeline frames")
        yield timeline_frames(base_url, owner, scale, max(2, repetitions // 8), seed)
        if full:
            with bench_client(base_url, owner.token) as client:
                yield crowded(client, owner, scale, repetitions, seed)


def _race(kept: Path, scale: int, seed: int) -> Iterator[list[Result]]:
    """Ours and the peers', in turn."""
    with bench_web() as (base_url, _):
        owner = load.create_tenant()
        with bench_client(base_url, owner.token) as client:
            yield race(client, base_url, owner, kept, scale, seed, _tell)


@contextmanager
def bench_web() -> Iterator[tuple[str, int]]:
    """A web process with production settings: its address and process id."""
    from django.core.management import call_command

    from oppo_platform.embedded.ports import LOOPBACK, saved_port

    call_command("buildstatic", verbosity=0)
    port = saved_port(Path(os.environ["OPPO_HOME"]), "web")
    rate = {"OPPO_API_RATE": str(RATE)}
    environ = {**os.environ, **rate, "OPPO_BASE_URL": f"http://{LOOPBACK}:{port}", "OPPO_LOG_FORMAT": "json"}
    process = subprocess.Popen([sys.executable, "-m", "oppo_cli", "web", "--port", str(port)], env=environ)
    try:
        _wait_for_web(environ["OPPO_BASE_URL"], process)
        yield environ["OPPO_BASE_URL"], process.pid
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
            pass  # not listening yet
        if process.poll() is not None or time.monotonic() > deadline:
            raise Failure("The web process did not start.")
        time.sleep(0.05)


@contextmanager
def bench_client(base_url: str, token: str) -> Iterator[httpx.Client]:
    """A client of one connection, with this token."""
    import httpx

    headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "br, gzip"}
    with httpx.Client(base_url=base_url, headers=headers, timeout=60.0) as client:
        yield client


def _logging(steps: int) -> list[Result]:
    """Cost of events for a training engine, in a process of its own."""
    from oppo_bench.document import Result

    command = [sys.executable, "-m", "oppo_bench.telemetry.logging_cost", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(f"The engine could not be measured: {done.stderr[-1000:]}")
    measured = json.loads(done.stdout.splitlines()[-1])
    units = {"logging_cost_share": "share", "logging_us_a_step": "us", "logging_us_a_call": "us", "logged_step_ms": "ms"}
    return [Result.of(name, unit, measured[name]) for name, unit in units.items()]
