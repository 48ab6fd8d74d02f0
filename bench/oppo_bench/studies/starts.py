"""How long do starts take, and what does an idle platform hold? `python bench/starts.py [--repetitions N] [--demo] [--json FILE]`

`oppo up` in a new home (cold: the database is created) and again in the same one (warm), each until its first page is there; the
memory of all its processes after half a minute without work; and a run of the smallest models, from its claim to its first
trained step. `--demo` also runs `oppo demo --exit`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from oppo_bench.document import Result
from oppo_bench.platform_stack import Running, ready_servers, running_platform, tiny_run, wait_for
from oppo_bench.report import write_results
from oppo_bench.scheduler.command import bench_servers, other_programs
from oppo_cli.processes import oppo_command
from oppo_platform import embedded

REPETITIONS, LEFT_OUT = 5, 1
IDLE_S = 30.0
MB = 1e6
ADDRESS = re.compile(r"http://\S+:\d+")
# Goals: seconds, and megabytes.
GOALS = {"up_cold_s": 8.0, "up_warm_s": 3.0, "claim_to_first_step_s": 2.0, "idle_mb": 600.0, "demo_s": 120.0}


def environ_of(home: Path) -> dict[str, str]:
    """This process's variables without its platform's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DATABASE_", "REDIS_", "OPPO_"))}
    return kept | {"OPPO_HOME": str(home)}


@contextmanager
def platform_up(home: Path) -> Iterator[tuple[psutil.Process, float]]:
    """`oppo up` until its login page is there; yields its process and the seconds until then."""
    begun = time.perf_counter()
    up = subprocess.Popen(
        oppo_command("up"), env=environ_of(home), cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        address = next((found[0] for line in up.stdout if (found := ADDRESS.search(line))), None)
        if address is None:
            raise RuntimeError(f"oppo up ended with status {up.wait()}")
        with httpx.Client(trust_env=False) as client:
            client.get(f"{address}/accounts/login/").raise_for_status()
        yield psutil.Process(up.pid), time.perf_counter() - begun
    finally:
        up.terminate()
        up.communicate()


def starts(repetitions: int) -> tuple[list[float], list[float], dict[str, float]]:
    """Seconds of cold and warm starts, and the memory by process of the last platform, MB (proportional set size)."""
    cold, warm, memory = [], [], {}
    for number in range(repetitions):
        with tempfile.TemporaryDirectory(prefix="oppo-bench-") as folder:
            home = Path(folder)
            try:
                with platform_up(home) as (_, seconds):
                    cold.append(seconds)
                with platform_up(home) as (up, seconds):
                    warm.append(seconds)
                    if number == repetitions - 1:
                        time.sleep(IDLE_S)
                        memory = held_memory(up)
            finally:
                for server in (embedded.PostgresServer(home), embedded.ValkeyServer(home)):
                    server.remove_data()  # as root it is elsewhere
    return cold, warm, memory


def held_memory(up: psutil.Process) -> dict[str, float]:
    """Megabytes by program, pages that several processes share divided among them."""
    memory: dict[str, float] = {}
    for process in (up, *up.children(recursive=True)):
        line = process.cmdline()
        name = process.name() if "oppo_cli" not in line else " ".join(line[line.index("oppo_cli") + 1 :][:2])
        memory[name] = memory.get(name, 0.0) + process.memory_full_info().pss / MB
    return memory


def first_steps(repetitions: int) -> list[float]:
    """Seconds from the claim of a run to the end of its first step, on a worker that is ready."""
    taken = []
    with bench_servers(), running_platform(1, {}) as running:
        wait_for(lambda: ready_servers(running.stack), "the worker's fork servers")
        for number in range(LEFT_OUT + repetitions):
            taken.append(first_step(running, number))
    return taken[LEFT_OUT:]


def first_step(running: Running, number: int) -> float:
    """One run, from its claim to its first step's event."""
    attempts = running.stack.home.path / "worker" / "attempts"
    run_id = running.submit(tiny_run(f"start {number}", 200))

    def elapsed() -> float | None:
        for file in attempts.glob("*/engine.jsonl"):
            for line in file.read_text().splitlines():
                event: dict[str, Any] = json.loads(line)
                if event["kind"] == "step":
                    return float(event["time"]) - (file.parent / "claim.json").stat().st_mtime
        return None

    seconds: float = wait_for(elapsed, "the first step")
    wait_for(lambda: running.ended([run_id]), "the run's end")
    return seconds


def demo() -> float:
    """Seconds of `oppo demo --exit` in a new home."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="oppo-bench-") as folder:
        home = Path(folder)
        try:
            subprocess.run(oppo_command("demo", "--exit"), cwd=home, env=environ_of(home), check=True)
        finally:
            embedded.PostgresServer(home).remove_data()
    return time.perf_counter() - begun


def main() -> int:
    """Measure, print, and write the benchmark format if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--demo", action="store_true", help="run the demo too (two minutes)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    machine = other_programs()
    cold, warm, memory = starts(options.repetitions)
    results = [Result.of("up_cold_s", "s", cold), Result.of("up_warm_s", "s", warm)]
    results += [Result.of("idle_mb", "MB", [sum(memory.values())])]
    results += [Result.of(f"idle_mb/{name}", "MB", [size]) for name, size in sorted(memory.items(), key=lambda item: -item[1])]
    results.append(Result.of("claim_to_first_step_s", "s", first_steps(options.repetitions)))
    if options.demo:
        results.append(Result.of("demo_s", "s", [demo()]))
    for result in results:
        goal = GOALS.get(result.name)
        shown = "" if goal is None else f"  goal {goal:g}{'' if result.median <= goal else ' missed'}"
        print(f"{result.name:40} {result.median:8.2f} {result.unit:3} ({result.min:.2f}–{result.max:.2f}, n = {result.n}){shown}")
    write_results("starts", machine, {"repetitions": options.repetitions}, results, options.json)
    return 0
