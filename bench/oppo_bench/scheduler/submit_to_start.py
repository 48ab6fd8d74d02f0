"""Time from the click to the engine's first event: `submit_to_start_s` of `oppo bench scheduler`, by stage, without stand-ins."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_bench.platform_stack import Running, ready_servers, running_platform, tiny_run, wait_for

if TYPE_CHECKING:
    from oppo_bench.document import Result

LEFT_OUT = 2  # the first runs warm up the web process and the database
STEPS = 20
# Stages between a click and the engine's first event.
LEGS = {
    "submit": "the call, until the run is written down",
    "cycle": "the scheduler is woken and gives it a device",
    "order": "the commit, and the order's way to the broker",
    "agent": "broker, consumer, agent, until its supervisor lives",
    "claim": "until the claim is answered and kept",
    "engine": "spec, run folder, guard, engine, until its first event",
}


def submit_to_start(repetitions: int) -> list[Result]:
    """Submit runs one by one to an idle cluster. Returns the total, its stages, and the time until the platform knows of the
    start."""
    from oppo_bench.document import Result

    taken, known = [], []
    with running_platform(1, {}) as running:
        wait_for(lambda: ready_servers(running.stack), "the worker's fork servers")
        for number in range(LEFT_OUT + repetitions):
            stations, told_after = start_one(running, number)
            if number >= LEFT_OUT:
                taken.append(stations)
                known.append(told_after)
    whole = [stations[-1] - stations[0] for stations in taken]
    legs = [
        Result.of(f"submit_to_start_s/{leg}", "s", [stations[n + 1] - stations[n] for stations in taken])
        for n, leg in enumerate(LEGS)
    ]
    return [
        Result.tail("submit_to_start_s/p95", "s", whole), Result.of("submit_to_start_s", "s", whole), *legs,
        Result.of("start_to_known_s", "s", known),
    ]  # fmt: skip


def start_one(running: Running, number: int) -> tuple[list[float], float]:
    """One run from submission to end: the time of each stage, and how long after its start the platform knew."""
    from oppo_platform.runs.models import Transition
    from oppo_platform.scheduling.models import Dispatch

    clicked = time.time()
    run_id = running.submit(tiny_run(f"start {number}", STEPS))
    supervised, claimed, started = _first_event(running.stack.home.path / "worker" / "attempts")
    wait_for(lambda: running.ended([run_id]), "the run's end")
    moved = {told.new: told.at.timestamp() for told in Transition.objects.filter(run_id=run_id)}
    sent = Dispatch.objects.get(attempt__run_id=run_id).sent_at
    assert sent is not None, "it ran, so its order was sent"
    stations = [clicked, moved["queued"], moved["allocated"], sent.timestamp(), supervised, claimed, started]
    return stations, moved["running"] - started


def _first_event(attempts: Path) -> tuple[float, float, float]:
    """Wait for the run's one attempt: start of its supervisor, time of its claim, and time of its first event."""

    def told() -> tuple[float, float, float] | None:
        for file in attempts.glob("*/engine.jsonl"):
            line, whole, _ = file.read_text().partition("\n")
            if whole:
                folder = file.parent
                return (folder / "lock").stat().st_mtime, (folder / "claim.json").stat().st_mtime, json.loads(line)["time"]
        return None

    found: tuple[float, float, float] = wait_for(told, "the engine's first event")
    wait_for(lambda: not list(attempts.glob("*/engine.jsonl")), "the attempt's files to be cleared away")
    return found
