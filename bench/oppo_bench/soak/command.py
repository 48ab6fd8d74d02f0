"""The whole platform for hours at three times the usual rate of runs: does anything grow, or become slower?

Web, scheduler, housekeeper, database, broker and one worker are processes; tiny runs are submitted at a fixed rate and trained
by the real engine; 20 pages are open (`soak.pages`). Every ten seconds all processes are sampled by their role, every twenty
seconds ten API calls are timed. Exit status 0 if nothing grew or became slower (bounds: `soak.verdict`).
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from oppo_bench.document import Result
from oppo_bench.platform_stack import Running, ready_servers, running_platform, tiny_run, wait_for
from oppo_bench.report import write_results
from oppo_bench.scheduler.command import bench_servers, other_programs
from oppo_bench.soak import verdict
from oppo_bench.soak.pages import OpenPages
from oppo_cli.home import Failure

# No document says how many runs are usual. One a minute is a team that tries settings all day on one worker.
USUAL_RUNS_PER_HOUR, TIMES_USUAL = 60, 3
STEPS = 300  # eight seconds: the worker trains, and reports 40 steps a second, 40 % of the time
FILLED = 55  # short runs beforehand: more than the list's first page, which is then as long at the start as at the end
REFERENCE, REFERENCE_STEPS = 5, 100  # runs that the timed calls read: the same data at the start and at the end
PAGES = 20
SAMPLE_S, CALLS_S, TICK_S = 10.0, 20.0, 0.1
CALL_ROUNDS = 2
DRAINED_S = 120.0
MIB = 2**20
# Roles by command lines; the first that matches. Other processes belong to attempts: supervisors, guards, engines.
ROLES = {
    "lifeline.py": "guards", "postgres": "database", "valkey-server": "broker", "oppo_cli web": "web",
    "oppo_cli scheduler": "scheduler", "oppo_cli housekeeper": "housekeeper", "worker agent": "agent",
    "worker consume": "consumer", "prefork worker ready": "fork server: supervisors",
    "prefork oppo_core ready": "fork server: engines",
}  # fmt: skip
LASTING = ("web", "scheduler", "housekeeper", "agent", "consumer")  # the fork servers are replaced hourly
STORED = "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class WHERE relkind = 'r' AND relname LIKE 'telemetry_%'"

Sample = dict[tuple[str, str], float]
Taken = dict[str, list[tuple[float, float]]]  # (hour, ms) by call


def role_of(line: str) -> str:
    """Role of a process by its command line."""
    return next((role for words, role in ROLES.items() if words in line), "attempts")


def look(parent: psutil.Process, database_port: int) -> tuple[Sample, dict[str, set[int]]]:
    """Memory in MiB, descriptors, threads, connections to the database by role, and each role's process ids.

    Memory is resident memory that is neither a file's nor shared: PostgreSQL's shared buffers have a fixed size and fill up.
    """
    found: Sample = defaultdict(float)
    pids: dict[str, set[int]] = defaultdict(set)
    for process in parent.children(recursive=True):
        try:
            role, memory = role_of(" ".join(process.cmdline())), process.memory_info()
            figures = {"mib": (memory.rss - memory.shared) / MIB, "descriptors": process.num_fds()}
            figures["threads"] = process.num_threads()
            if role != "database":
                sockets = process.net_connections("tcp")
                figures["connections"] = sum(bool(s.raddr) and s.raddr.port == database_port for s in sockets)
        except psutil.Error:  # it has just ended
            continue
        pids[role].add(process.pid)
        for quantity, figure in figures.items():
            found[role, quantity] += figure
    return found, pids


class Soak:
    """The load and what was measured under it."""

    def __init__(self, running: Running, api: httpx.Client, pages: OpenPages, reference: list[int]) -> None:
        from oppo_bench.api.command import calls_on
        from oppo_bench.api.load import Dataset

        self.running, self.api, self.pages = running, api, pages
        self.calls = calls_on(Dataset(reference, {}))
        del self.calls["submit_run"]  # timed where the runs are submitted
        self.history, self.taken, self.runs = verdict.History(), Taken(), list[int]()
        self.faults: list[str] = []
        self.behind = 0  # runs that had not ended when the time was up
        self._port, self._lasting = urlsplit(os.environ["DATABASE_URL"]).port or 5432, dict[str, set[int]]()
        self._start = time.monotonic()

    def hold(self, hours: float) -> None:
        """Submit, sample and time for so long."""
        self._start = time.monotonic()
        acts = {self._submit: 3600 / (USUAL_RUNS_PER_HOUR * TIMES_USUAL), self._sample: SAMPLE_S, self._time_calls: CALLS_S}
        due = dict.fromkeys(acts, self._start)
        while self._hour() < hours:
            for act, every_s in acts.items():
                if time.monotonic() >= due[act]:
                    due[act] += every_s
                    try:
                        act()
                    except httpx.HTTPError as error:
                        self.faults.append(f"after {self._hour():.2f} hours: {type(error).__name__} {error}")
            if self.running.stack.signals.stop_requested:
                raise Failure("Interrupted.")
            time.sleep(TICK_S)

    def drain(self) -> None:
        """Wait until every run has ended and was counted; runs that were too many or unsuccessful are faults."""
        from oppo_platform.runs.models import Run

        try:
            self._wait_for_ends()
            wait_for(lambda: counted_all(self.runs), "the runs' data to be counted", DRAINED_S)
        except Failure as failure:
            self.faults.append(f"{failure.message} The worker does not keep up, or the machine is busy.")
        bad = Run.objects.filter(pk__in=self.runs).exclude(state="succeeded")
        self.faults += [f"run {run.pk}: {run.state}, {run.reason}" for run in bad]
        self.faults += [f"{fault} ({count} ×)" for fault, count in self.pages.faults.items()]

    def _wait_for_ends(self) -> None:
        """Wait until every run has ended, as long as some still do: a machine that others use too may have fallen behind."""
        self.behind = len(self.runs) - self.running.ended(self.runs)
        while (ended := self.running.ended(self.runs)) < len(self.runs):
            wait_for(lambda seen=ended: self.running.ended(self.runs) > seen, "the next run's end", DRAINED_S)

    def _hour(self) -> float:
        return (time.monotonic() - self._start) / 3600

    def _submit(self) -> None:
        body = {"spec": tiny_run(f"soak {len(self.runs)}", STEPS)}
        began = time.perf_counter()
        reply = self.api.post("/api/v1/runs", json=body).raise_for_status()
        self.taken.setdefault("submit_run", []).append((self._hour(), 1e3 * (time.perf_counter() - began)))
        self.runs.append(reply.json()["id"])
        self.pages.newest = self.runs[-1]

    def _sample(self) -> None:
        found, pids = look(psutil.Process(), self._port)
        self.history.add(self._hour(), found)
        for role in LASTING:
            if pids[role] != self._lasting.setdefault(role, pids[role]):
                self.faults.append(f"{role} was restarted, or is gone: {self._lasting[role]} → {pids[role]}")
                self._lasting[role] = pids[role]

    def _time_calls(self) -> None:
        for number in range(CALL_ROUNDS):
            for name, call in self.calls.items():
                began = time.perf_counter()
                call(self.api, len(self.taken.get(name, ())) + number)
                self.taken.setdefault(name, []).append((self._hour(), 1e3 * (time.perf_counter() - began)))


def stored_mib() -> tuple[float, float, float]:
    """MiB of the tables with the runs' data, of what the platform counted for them, and of the whole database."""
    from django.db import connection
    from django.db.models import F, Sum

    from oppo_platform.storage.models import RunStorage

    with connection.cursor() as cursor:
        cursor.execute(STORED)
        tables = int(cursor.fetchone()[0])
        cursor.execute("SELECT pg_database_size(current_database())")
        whole = int(cursor.fetchone()[0])
    counted = RunStorage.objects.aggregate(all=Sum(F("series") + F("timeline") + F("samples") + F("logs")))["all"] or 0
    return tables / MIB, counted / MIB, whole / MIB


def counted_all(runs: list[int]) -> bool:
    """Whether the housekeeper has counted everything of these runs."""
    from oppo_platform.storage.models import RunStorage

    return RunStorage.objects.filter(run__in=runs, settled=True).count() == len(runs)


def measure(hours: float) -> tuple[Soak, verdict.DatabaseSize, float]:
    """Start the platform, fill it, and hold the load. Returns measurements, growth, and MiB of the whole database."""
    from oppo_bench.telemetry.command import bench_client
    from oppo_platform.accounts.api_tokens import create_api_token
    from oppo_platform.accounts.models import User
    from oppo_platform.accounts.services import create_login_link
    from oppo_platform.projects.models import Project

    with running_platform(1, {}) as running:
        wait_for(lambda: ready_servers(running.stack), "the worker's fork servers")
        user, team = User.objects.get(), Project.objects.get(pk=running.project).team
        filling = [running.submit(tiny_run(f"reference {n}", REFERENCE_STEPS)) for n in range(REFERENCE)]
        filling += [running.submit(tiny_run(f"short {n}", 2)) for n in range(FILLED)]
        wait_for(lambda: running.ended(filling) == len(filling) and counted_all(filling), "the first runs' ends", 300.0)
        before, counted_before, _ = stored_mib()
        login, token = f"/login-link/{create_login_link(user).rpartition('/')[2]}", create_api_token(user, team, "soak").text
        with (
            bench_client(running.stack.local_url(), token) as api,
            OpenPages(running.stack.local_url(), login, PAGES, filling[0]) as pages,
        ):
            soak = Soak(running, api, pages, filling[:REFERENCE])
            soak.hold(hours)
            if pages.open_streams < PAGES - 2:  # one or two are just moving to another run
                soak.faults.append(f"only {pages.open_streams} of {PAGES} streams are open at the end")
            soak.drain()
        after, counted, whole = stored_mib()
    return soak, verdict.DatabaseSize(after - before, counted - counted_before), whole


def results_of(
    soak: Soak, trends: list[verdict.Trend], calls: list[verdict.CallTrend], size: verdict.DatabaseSize, whole_mib: float
) -> list[Result]:
    """Figures of the benchmark format; slopes with ± two standard errors as minimum and maximum."""
    found = []
    for trend in trends:
        name, margin, n = f"{trend.role}/{trend.quantity}", verdict.SURE_SE * trend.slope.error, len(soak.history.hours)
        found += [
            Result.of(f"{name}/first_quarter", trend.quantity, [trend.first]),
            Result.of(f"{name}/last_quarter", trend.quantity, [trend.last]),
            Result(
                f"{name}/per_hour", f"{trend.quantity}/h", trend.slope.per_hour, trend.slope.per_hour - margin,
                trend.slope.per_hour + margin, n,
            ),
        ]  # fmt: skip
    for call in calls:
        found += [
            Result(f"{call.name}_ms/p95/{part}", "ms", ms, ms, ms, call.n)
            for part, ms in (("first_quarter", call.first_ms), ("last_quarter", call.last_ms))
        ]
    sizes = {"database/grown": size.grown, "database/counted": size.counted, "database/whole": whole_mib}
    return found + [Result.of(name, "MiB", [mib]) for name, mib in sizes.items()]


def main() -> int:
    """Hold the load, print the tables, and name what is not flat; 0 if everything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    duration = parser.add_mutually_exclusive_group()
    duration.add_argument("--hours", type=float, default=2.0)
    duration.add_argument("--minutes", type=float, help="for a short try")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hours = options.minutes / 60 if options.minutes else options.hours
    machine = other_programs()
    with bench_servers():
        soak, size, whole_mib = measure(hours)
    trends = soak.history.trends()
    calls = [verdict.call_trend(name, taken, hours) for name, taken in soak.taken.items()]
    settings: dict[str, Any] = {
        "hours": hours, "runs": len(soak.runs), "runs_per_hour": USUAL_RUNS_PER_HOUR * TIMES_USUAL, "steps": STEPS,
        "tabs": PAGES, "behind": soak.behind, **soak.pages.counts,
    }  # fmt: skip
    wrong = verdict.complaints(trends, calls, size, soak.faults)
    verdict.show(trends, calls, size)
    print(f"whole database {whole_mib:.1f} MiB; {settings}; load before {machine.load:.2f}")
    print("\n".join(["NOT FLAT:", *wrong]) if wrong else "Everything is flat.")
    write_results("soak", machine, settings, results_of(soak, trends, calls, size, whole_mib), options.json)
    return 1 if wrong else 0
