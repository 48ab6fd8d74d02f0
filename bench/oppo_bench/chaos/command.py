"""Does anything get lost, whatever fails? `python bench/chaos.py --seed N --minutes M [--json FILE]`

A platform with two workers trains short runs of several shapes while faults strike in an order that the seed decides. The log has
a line for each fault and for each run that ends. When time is up everything is mended, the runs continue to their ends, and the
laws of `conservation` are checked. Exit status 0 only if all hold.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from oppo_bench.chaos import faults
from oppo_bench.chaos.clock import Clock
from oppo_bench.chaos.conservation import Curve, curve, violations
from oppo_bench.chaos.faults import Struck, Target
from oppo_bench.chaos.proxy import Proxy
from oppo_bench.document import Result, document, write
from oppo_bench.machine_load import Machine
from oppo_bench.platform_stack import Running, add_worker, running_platform, tiny_run, wait_for
from oppo_platform.embedded.ports import saved_port

SMALL_DISK = 64 * 2**20
STEPS, RUNS_IN_FLIGHT = 30, 4
PAUSE_S = (2.0, 8.0)  # between two faults
MENDING_S = 600.0  # afterwards, for the runs to end
# Seconds instead of minutes: what a campaign of minutes must see happen.
LIMITS = {
    "OPPO_LEASE_S": "30", "OPPO_LEASE_MARGIN_S": "5", "OPPO_NODE_FRESH_S": "8", "OPPO_ORPHAN_GRACE_S": "3",
    "OPPO_REDISPATCH_S": "5", "OPPO_RENDEZVOUS_S": "20", "OPPO_MAX_NODE_FAILURES": "1000", "OPPO_HOUSEKEEPING_S": "2",
    "OPPO_LOW_DISK_BYTES": "0", "OPPO_OUTBOX_LEAST_FREE_BYTES": str(8 * 2**20), "OMP_NUM_THREADS": "1",
}  # fmt: skip
OVERLAPPED = {
    "overlap": {
        "intra_step": "per_chunk", "inter_step": "defer", "overcommit": {"initial": 2, "max": 4}, "chunk": {"size": 4},
    },
}  # fmt: skip
TWO_NODES = {"nodes": 2, "devices": 2, "cpu_threads": 1, "dtype": "float64"}
SHAPES: dict[str, dict[str, Any]] = {
    "sequential": {},
    "overlapped": OVERLAPPED,
    "GRPO": {"ppo": {"algorithm": "grpo", "group_size": 2, "batch_size": 4}},
    "adapter": {"lora": {"rank": 2}},
    "two nodes": {"resources": TWO_NODES},
    "two nodes, sharded": {"resources": TWO_NODES, "training": {"backend": "fsdp2"}},
}
PROCESSES = ("engine", "supervisor", "agent", "consumer", "fork server", "web", "scheduler", "housekeeper", "database", "broker")
FAULTS: list[tuple[float, Callable[[Target], Struck | None]]] = [
    *((1.0, partial(faults.kill, kind=kind)) for kind in PROCESSES),
    *((0.5, partial(faults.end, kind=kind)) for kind in ("engine", "supervisor", "agent", "web", "scheduler", "database")),
    *((0.7, partial(faults.freeze, kind=kind)) for kind in ("engine", "supervisor", "agent", "web", "scheduler", "database")),
    (2.0, faults.cut), (1.0, faults.slow), (1.0, faults.jump), (2.0, faults.fill_disk), (0.7, faults.back_up),
]  # fmt: skip


def spec(shape: str) -> dict[str, Any]:
    """The run of a shape; the same one each time."""
    base = tiny_run(shape, STEPS)
    changes = dict(SHAPES[shape])
    models = {**base["models"], **({"lora": changes.pop("lora")} if "lora" in changes else {})}
    if changes.get("ppo", {}).get("algorithm") == "grpo":
        models.pop("critic")
    common = {
        "models": models, "resources": {"cpu_threads": 1, "dtype": "float64"}, "checkpoints": {"every_steps": 5, "keep": 2},
        "retries": {"attempts": 100, "backoff_s": 0.5},
    }  # fmt: skip
    return {**base, **common, **changes}


class Campaign:
    """Faults by the seed, and runs that keep the workers busy."""

    def __init__(self, running: Running, target: Target, seed: int) -> None:
        self.running, self.target, self.seed = running, target, seed
        self.began = time.monotonic()
        self.shapes: dict[int, str] = {}
        self.ended: set[int] = set()
        self.undo: list[tuple[float, faults.Undo]] = []
        self.struck: Counter[str] = Counter()

    def run(self, minutes: float) -> None:
        """Strike until time is up, then mend everything and wait until every run has ended."""
        for number in itertools.count():
            # Drawn anew each time: what a fault draws does not depend on what the faults before it found.
            self.target.rng = random.Random(f"{self.seed}/{number}")
            if time.monotonic() - self.began > 60 * minutes:
                break
            self._submit()
            self._strike()
            self._live(self.target.rng.uniform(*PAUSE_S))
        self.tell("time is up: everything is mended")
        self._mend(everything=True)
        deadline = time.monotonic() + MENDING_S
        while time.monotonic() < deadline and (len(self.ended) < len(self.shapes) or self._devices_held()):
            self._live(1.0)

    def tell(self, text: str) -> None:
        """A line of the log."""
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def _strike(self) -> None:
        weights, choices = zip(*FAULTS, strict=True)
        [fault] = self.target.rng.choices(choices, weights)
        struck = fault(self.target)
        if struck is None:
            return
        name = fault.func.__name__ if isinstance(fault, partial) else fault.__name__
        self.struck[name] += 1
        self.tell(struck.text)
        if struck.undo is not None:
            self.undo.append((time.monotonic() + struck.lasts_s, struck.undo))

    def _live(self, seconds: float) -> None:
        """Let time pass: restart what ended, undo what is over, tell which runs have ended."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.running.stack.keep_alive(min(left, 0.5))
            if self.running.stack.signals.stop_requested:
                raise KeyboardInterrupt
            self._mend()
            with database_may_be_away():
                self._look()

    def _mend(self, *, everything: bool = False) -> None:
        now = time.monotonic()
        due = [undo for at, undo in self.undo if everything or at <= now]
        self.undo = [(at, undo) for at, undo in self.undo if not everything and at > now]
        for undo in due:
            undo()

    def _submit(self) -> None:
        """Keep some runs in flight, of shapes that the seed decides. Without the platform, later."""
        while len(self.shapes) - len(self.ended) < RUNS_IN_FLIGHT:
            shape = random.Random(f"{self.seed}/run {len(self.shapes)}").choice(list(SHAPES))
            try:
                run_id = self.running.submit(spec(shape))
            except Exception as error:  # noqa: BLE001 - whatever the campaign has broken
                self.tell(f"a run cannot be submitted now: {str(error).splitlines()[0][:100]}")
                return
            self.shapes[run_id] = shape
            self.tell(f"run {run_id} is submitted: {shape}")

    def _look(self) -> None:
        from oppo_contract.states import ENDED
        from oppo_platform.runs.models import Run

        for run in Run.objects.filter(pk__in=self.shapes.keys() - self.ended, state__in=ENDED):
            self.ended.add(run.pk)
            self.tell(f"run {run.pk} has {run.state} at step {run.step} after {run.epochs} attempts")

    @staticmethod
    def _devices_held() -> bool:
        from oppo_platform.cluster.models import Device, DeviceState

        with database_may_be_away():
            return Device.objects.exclude(state=DeviceState.READY).exists()
        return True


@contextmanager
def database_may_be_away() -> Iterator[None]:
    """Ignore that the campaign has stopped the database; the next query connects anew."""
    from django.db import Error, connections

    try:
        yield
    except Error:
        connections.close_all()


@contextmanager
def platform(home: Path) -> Iterator[tuple[Running, Target]]:
    """A platform whose second worker is behind a proxy and has a small disk of its own, if one can be mounted."""
    os.environ |= {"OPPO_HOME": str(home), "OPPO_ARTIFACT_ROOT": (home / "artifacts").as_uri(), **LIMITS}
    saved_port(home, "web")  # not 8000, which others on this machine may take at the same time
    with _small_disk(home / "second") as small, running_platform(1, {}) as running:
        proxy, clock = Proxy(int(running.stack.environ["OPPO_PORT"])), Clock(home / "clock")
        try:
            add_worker(running.stack, running.join_token, "second", proxy.url, clock.environ)
            wait_for(lambda: _nodes() == 2, "the second worker")
            yield running, Target(home, proxy, clock, small)
        finally:
            proxy.close()


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        print("no file system can be mounted here: the campaign fills no disk", flush=True)
        yield None
        return
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=False)


def _nodes() -> int:
    from oppo_platform.cluster.models import CatalogueItem

    return CatalogueItem.objects.filter(kind="prompts").values("node").distinct().count()


def _references(running: Running) -> dict[str, Curve]:
    """The reward curve of each shape without any fault."""
    runs = {shape: running.submit(spec(shape)) for shape in SHAPES}
    deadline = time.monotonic() + MENDING_S
    while running.ended(list(runs.values())) < len(runs) and time.monotonic() < deadline:
        running.stack.keep_alive(0.5)
    return {shape: curve(running, run_id) for shape, run_id in runs.items()}


def _remove(home: Path, *, keep: bool) -> None:
    """Delete the platform's files, unless its logs are needed; the database is stopped, and can be started for a look at it."""
    from oppo_platform import embedded

    if keep:
        print(f"kept for a look at what went wrong: {home}", flush=True)
        return
    for server in (embedded.PostgresServer(home), embedded.ValkeyServer(home)):
        server.remove_data()  # as root it is elsewhere
    shutil.rmtree(home)


def main() -> int:
    """Run the campaign, print what is broken, write; 0 if nothing is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = Machine(os.cpu_count() or 1, os.getloadavg()[0], None)
    home = Path(tempfile.mkdtemp(prefix="chaos-"))
    with platform(home) as (running, target):
        logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)  # of this process's own connections
        undisturbed = _references(running)
        campaign = Campaign(running, target, options.seed)
        campaign.tell(f"seed {options.seed}: {len(SHAPES)} shapes have trained undisturbed")
        campaign.run(options.minutes)
        broken = list(violations(running, campaign.shapes, undisturbed, target))
        if broken and target.small_disk is not None:
            shutil.copytree(target.small_disk, home / "second-disk")
    _remove(home, keep=bool(broken))
    for line in broken:
        print(f"BROKEN  {line}", flush=True)
    print(f"seed {options.seed}: {campaign.struck.total()} faults, {len(campaign.shapes)} runs, {len(broken)} laws broken")
    if options.json:
        figures = {"faults": campaign.struck.total(), "runs": len(campaign.shapes), "broken": len(broken)}
        rows = [Result.of(f"chaos/{name}", "count", [value]) for name, value in figures.items()]
        write(options.json, document("chaos", machine, {"seed": options.seed, "minutes": options.minutes}, rows))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
