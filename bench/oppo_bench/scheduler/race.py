"""`oppo bench scheduler --peers`: starts, cycles and hand-overs beside Slurm, in turn on the same machine.

During one's cycle or hand-over the other's controller is suspended. Slurm keeps its queue in memory and has no fair shares,
quotas or stored reasons here; ours stores every decision in PostgreSQL.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from oppo_bench.platform_stack import running_platform, wait_for
from oppo_bench.scheduler import stub_engine
from oppo_bench.scheduler.hand_over import ENDED_A_CYCLE, Broker, end_some, scheduler_process
from oppo_bench.scheduler.load import Load, begin_all, build, generator, requested_gpus
from oppo_bench.scheduler.slurm import Slurm, running_slurm
from oppo_bench.scheduler.submit_to_start import LEFT_OUT, start_one
from oppo_cli.home import Failure

if TYPE_CHECKING:
    from oppo_bench.document import Result

LOAD = Load(1000, 200)
NICE, LIMITS_MIN = 40, (None, 60, 600)  # as the priorities and limits of `load`
SETTLED_S, START_WITHIN_S, BACKFILL_WITHIN_S = 1.5, 5.0, 3.0
OURS, SLURM = "OPPO", "Slurm"
Turns = Sequence[float | None]


def race(starts: int, cycles: int, freed: int, seed: int, progress: Callable[[str], None]) -> Generator[list[Result]]:
    """All figures of both, and the ratio Slurm's ÷ ours. Raises Failure if Slurm is missing or does not start."""
    mixed, single = replace(LOAD, seed=seed), replace(LOAD, seed=seed, single=True)
    with _slurm() as slurm:
        progress(f"{starts} starts on an idle cluster")
        yield _starts(slurm, starts, generator(seed))
        progress(f"{LOAD.waiting} waiting jobs of one to eight GPUs on {LOAD.gpus}")
        build(mixed)
        _fill(slurm, mixed, generator(seed))
        yield _cycles(slurm, cycles, generator(seed))
        progress(f"{freed} times a freed GPU")
        yield _freed(slurm, freed, "freed_to_dispatch_ms", generator(seed))
    with _slurm() as slurm:
        progress(f"{LOAD.waiting} waiting jobs of one GPU, {freed} times a freed one")
        build(single)
        _fill(slurm, single, generator(seed))
        yield _freed(slurm, freed, "freed_to_dispatch_single_ms", generator(seed))


@contextmanager
def _slurm() -> Iterator[Slurm]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="oppo-bench-", ignore_cleanup_errors=True)))
        yield stack.enter_context(running_slurm(folder, LOAD.gpus))


def compared(name: str, ours: Turns, peers: Mapping[str, Turns], tails: bool = True) -> list[Result]:
    """Figures of all, in milliseconds, and the peers' ÷ ours in the same turn; None: a turn without a value.

    `tails`: 95th percentiles as well. Raises Failure if one has no value at all.
    """
    from oppo_bench.document import Result

    results: list[Result] = []
    known = {who: [value for value in values if value is not None] for who, values in {OURS: ours, **peers}.items()}
    if empty := [who for who, values in known.items() if not values]:
        raise Failure(f"{name} has no value of {', '.join(empty)} in {len(ours)} turns.")
    for key, kind in ((name, Result.of), *([(f"{name}/p95", Result.tail)] if tails else [])):
        rows = {who: kind(f"{key}/{who}", "ms", values) for who, values in known.items()}
        results += rows.values()
        for peer, theirs in peers.items():
            turns = [other / own for own, other in zip(ours, theirs, strict=True) if own is not None and other is not None]
            if not turns or key != name:  # of two percentiles there is one ratio
                turns = [rows[peer].median / rows[OURS].median]
            results.append(Result.of(f"{key}/{peer}/ours_times_better", "ratio", turns))
    return results


def _starts(slurm: Slurm, repetitions: int, chance: random.Random) -> list[Result]:
    """From the user's call until the program of the run, or job, runs: a trivial program in both."""
    ours, theirs = [], []
    everything = slurm.idle_nodes()
    engine = shlex.join([sys.executable, "-I", "-S", stub_engine.__file__])
    with running_platform(1, {"OPPO_ENGINE_COMMAND": engine}) as running:
        for number in range(LEFT_OUT + repetitions):
            time.sleep(chance.random())  # both have periodic loops
            stations, _ = start_one(running, number)
            time.sleep(chance.random())
            began = time.time()
            job = slurm.submit(1)
            at = wait_for(partial(slurm.started_at, job), "a job's start")
            slurm.end([job])
            wait_for(lambda: slurm.idle_nodes() == everything, "the job's end")
            if number >= LEFT_OUT:
                ours.append(1e3 * (stations[-1] - stations[0]))
                theirs.append(1e3 * (at - began))
    return compared("submit_to_program_ms", ours, {SLURM: theirs})


def _fill(slurm: Slurm, load: Load, chance: random.Random) -> None:
    """A queue of jobs like that of `load.build`."""
    for size in requested_gpus(load, chance):
        slurm.submit(size, chance.randint(0, NICE), chance.choice(LIMITS_MIN))
    _settle(slurm)


def _settle(slurm: Slurm) -> None:
    """Wait until no job has started for a while."""
    since = slurm.log_size()
    while True:
        time.sleep(SETTLED_S)
        if not slurm.starts(since)[1]:
            return
        since = slurm.log_size()


def _cycles(slurm: Slurm, repetitions: int, chance: random.Random) -> list[Result]:
    """Cycles after a twentieth of the running jobs have ended: ours plans, backfills and stores in one; Slurm's main scheduler
    starts what is in front, and its backfill is a cycle of its own."""
    from oppo_platform.scheduling.cycle import Kept, run_cycle

    kept = Kept()
    ours: list[float] = []
    theirs: dict[str, list[float]] = {"Slurm's main scheduler": [], "Slurm's backfill": []}
    run_cycle(kept)
    for _ in range(repetitions):
        with slurm.suspended():
            end_some(chance)
            result = run_cycle(kept)
            assert result is not None, "another scheduler runs on this database"
            ours.append(1e3 * result.took_s)
            begin_all(chance)
        slurm.reset_cycles()
        running = slurm.running()
        slurm.end(chance.sample(running, max(1, round(ENDED_A_CYCLE * len(running)))))
        time.sleep(BACKFILL_WITHIN_S)
        _settle(slurm)
        for values, mean in zip(theirs.values(), slurm.mean_cycles(), strict=True):
            if mean is None:
                raise Failure(f"Slurm had no cycle within {BACKFILL_WITHIN_S:g} s.")
            values.append(mean)
    return compared(f"cycle_ms/{LOAD.name}", ours, theirs, tails=False)


def _freed(slurm: Slurm, repetitions: int, name: str, chance: random.Random) -> list[Result]:
    """From the end of a job, as its controller logs it, to the next job's start order."""
    from oppo_bench.document import Result

    ours: list[float | None] = []
    theirs: list[float | None] = []
    with scheduler_process() as scheduler, Broker() as broker:
        broker.drain(settle_s=3.0)
        for _ in range(repetitions):
            with slurm.suspended():
                time.sleep(chance.random())
                ours.append(broker.free_one(chance))
            with _suspended(scheduler.pid):
                time.sleep(chance.random())
                theirs.append(_free_one(slurm, chance))
    kept_back = {who: turns.count(None) for who, turns in ((OURS, ours), (SLURM, theirs))}
    counts = [Result.of(f"{name}/kept_back/{who}", "times", [count]) for who, count in kept_back.items()]
    return compared(name, ours, {SLURM: theirs}) + counts


def _free_one(slurm: Slurm, chance: random.Random) -> float | None:
    """Milliseconds until Slurm starts a job on freed GPUs; None if it keeps them for the job in front."""
    since, deadline = slurm.log_size(), time.monotonic() + START_WITHIN_S
    slurm.end([chance.choice(slurm.running())])
    taken = None
    while taken is None and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, started = slurm.starts(since)
        taken = next((1e3 * (start - ended) for start in started if ended is not None and start >= ended), None)
    _settle(slurm)
    return taken


@contextmanager
def _suspended(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
