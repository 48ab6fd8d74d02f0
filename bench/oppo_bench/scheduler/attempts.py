"""Throughput of short attempts, and whether one is lost or duplicated: `oppo bench scheduler`.

Everything is real but the engine, which takes 50 ms (`oppo_bench.scheduler.stub_engine`): web, scheduler, broker, database and
four workers on this machine, since a node without GPUs runs one attempt at a time. Submissions keep the queue filled.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_bench.platform_stack import Running, processor_s, running_platform, tiny_run

if TYPE_CHECKING:
    from oppo_bench.document import Result

WORKERS = 4
WAITING = 24
STUCK_AFTER_S = 120.0
LOOK_EVERY_S = 0.1


def attempts_per_second(count: int) -> list[Result]:
    """Run `count` attempts; returns their rate, how the time of one is spent, and lost and duplicated attempts by the rows."""
    from oppo_bench.document import Result
    from oppo_bench.scheduler import stub_engine

    engine = shlex.join([sys.executable, "-I", "-S", stub_engine.__file__])
    with running_platform(WORKERS, {"OPPO_ENGINE_COMMAND": engine}) as running:
        named = [(child.process.pid, child.name) for child in running.stack.children if child.process is not None]
        parts = {pid: name if name in ("web", "scheduler") else "workers" for pid, name in named}
        began, used = time.monotonic(), processor_s(parts)
        runs = _serve(running, count)
        served_s, used_after = time.monotonic() - began, processor_s(parts)
        starts = _starts(running.stack.home.path)
    lost, doubled = _lost(runs), _doubled(runs, starts)
    return [
        Result.of("attempts_per_s", "1/s", [(count - lost) / served_s]),
        Result.of("attempts_lost", "attempts", [lost]),
        Result.of("attempts_doubled", "attempts", [doubled]),
        *(Result.of(f"attempt_cpu_ms/{part}", "ms", [1e3 * (used_after[part] - used[part]) / count]) for part in used),
        *_shares(runs, starts),
    ]


def _serve(running: Running, count: int) -> list[int]:
    """Submit runs and wait for them; raises when none has ended for a long time."""
    runs: list[int] = []
    progress_at, seen = time.monotonic(), 0
    while seen < count and time.monotonic() - progress_at < STUCK_AFTER_S:
        ended = running.ended(runs)
        if ended > seen:
            progress_at, seen = time.monotonic(), ended
        while len(runs) < count and len(runs) - ended < WORKERS + WAITING:
            runs.append(running.submit(tiny_run(f"short {len(runs)}", 1)))
        time.sleep(LOOK_EVERY_S)
    return runs


def _starts(home: Path) -> dict[int, list[dict[str, float]]]:
    """Files that every engine left, by its run."""
    found: dict[int, list[dict[str, float]]] = {}
    for file in home.glob("artifacts/**/start-*.json"):
        found.setdefault(int(file.parent.name), []).append(json.loads(file.read_text()))
    return found


def _lost(runs: list[int]) -> int:
    from oppo_contract.states import RunState
    from oppo_platform.runs.models import Run

    return len(runs) - Run.objects.filter(pk__in=runs, state=RunState.SUCCEEDED).count()


def _doubled(runs: list[int], starts: dict[int, list[dict[str, float]]]) -> int:
    """Attempts beyond a run's first, by the rows; and engines beyond an attempt's first, by their files."""
    from oppo_platform.runs.models import Attempt

    rows = Counter(Attempt.objects.filter(run_id__in=runs).values_list("run_id", flat=True))
    return sum(max(rows[run], len(starts.get(run, []))) - 1 for run in runs if rows[run])


def _shares(runs: list[int], starts: dict[int, list[dict[str, float]]]) -> list[Result]:
    """Shares of an attempt's time between allocation and end: start of its two processes, and the rest."""
    from oppo_bench.document import Result
    from oppo_platform.runs.models import Attempt
    from oppo_platform.scheduling.models import Dispatch

    sent = dict(Dispatch.objects.filter(attempt__run_id__in=runs).values_list("attempt__run_id", "sent_at"))
    legs: dict[str, list[float]] = {"order": [], "supervisor": [], "claim": [], "engine": [], "rest": [], "whole": []}
    for attempt in Attempt.objects.filter(run_id__in=runs, ended_at__isnull=False):
        told, ordered = starts.get(attempt.run_id), sent.get(attempt.run_id)
        if not told or ordered is None or attempt.ended_at is None:
            continue
        stations = [attempt.created_at.timestamp(), ordered.timestamp(), told[0]["lock"], told[0]["claim.json"], told[0]["began"]]
        stations.append(attempt.ended_at.timestamp())
        for leg, before, after in zip(legs, stations, stations[1:], strict=False):
            legs[leg].append(after - before)
        legs["whole"].append(stations[-1] - stations[0])
    if not legs["whole"]:
        return []
    started = [a + b for a, b in zip(legs["supervisor"], legs["engine"], strict=True)]
    share = statistics.fmean(started) / statistics.fmean(legs["whole"])
    return [Result.of(f"attempt_s/{leg}", "s", taken) for leg, taken in legs.items()] + [
        Result.of("process_start_share", "of an attempt's time", [share])
    ]
