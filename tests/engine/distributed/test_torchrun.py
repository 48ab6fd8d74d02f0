"""Two ranks as processes of their own, under the real torchrun or with its environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from oppo_contract.events import Event, parse_event
from oppo_core.checkpointing.save_restore import check_intact
from tests.engine.distributed.test_process_group import DEFER, TWO, Tree, free_port

PATIENCE_S = 120.0
# torchrun closes the pipes that it inherits, but hands on the variable that names one.
PIPE_OF_OTHERS = {"OPPO_LIFELINE_FD": "0"}


@dataclass(slots=True)
class Nodes:
    """Two launches, as two nodes' supervisors would start them."""

    out: Path
    launched: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, world: Any, tree: Tree, *more: str, threads: int = 1, torchrun: bool = True) -> None:
        """Start both."""
        port = free_port()
        command = [*world.command(tree, self.out, threads), *more]
        for rank in (0, 1):
            command[command.index("--events") + 1] = str(self.events_of(rank))
            asked = ["--nnodes", 2, "--node-rank", rank, "--nproc-per-node", 1, "--max-restarts", 0, "--log-dir", "/dev/null"]
            asked += ["--master-addr", "127.0.0.1", "--master-port", port]
            launcher = ["-m", "torch.distributed.run", *map(str, asked)] if torchrun else []
            given = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with (self.out / f"stderr-{rank}").open("ab") as errors:
                argv = [sys.executable, *launcher, "-m", "oppo_core", *command]
                self.launched.append(
                    subprocess.Popen(argv, stderr=errors, env=os.environ | (PIPE_OF_OTHERS if torchrun else given))
                )

    def events_of(self, rank: int) -> Path:
        """That rank's file."""
        return self.out / f"events-{rank}.jsonl"

    def events(self, rank: int) -> list[Event]:
        """What that rank has told."""
        path = self.events_of(rank)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [parse_event(line) for line in lines if line.endswith(b"\n")]

    def wait_until(self, what: Callable[[], bool]) -> None:
        """Wait for something that the events say."""
        until = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < until, [path.read_text() for path in self.out.glob("stderr-*")]
            time.sleep(0.05)

    def trained(self, step: int) -> bool:
        """Whether rank 0 has told that step."""
        return any(event.kind == "step" and event.step >= step for event in self.events(0))

    def engine(self, rank: int) -> psutil.Process:
        """The engine below that rank's torchrun."""
        (engine,) = [child for child in psutil.Process(self.launched[rank].pid).children() if "oppo_core" in child.cmdline()]
        return engine

    def end(self) -> list[int]:
        """Both launches' exit statuses, once they have ended."""
        return [launch.wait(timeout=PATIENCE_S) for launch in self.launched]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Two nodes on this machine; nothing of them outlives the test."""
    started = Nodes(tmp_path)
    yield started
    for launch in started.launched:
        for process in [*psutil.Process(launch.pid).children(recursive=True)] if launch.poll() is None else []:
            process.kill()
        launch.kill()
        launch.wait()


def finished(event: Event) -> tuple[str, int]:
    """A last event's outcome and step."""
    assert event.kind == "finished"
    return event.outcome, event.step


@pytest.mark.full
def test_under_torchrun_a_stop_on_one_node_ends_both(world: Any, nodes: Nodes) -> None:
    nodes.start(world, world.tree(DEFER, TWO, {"steps": 10_000}))
    nodes.wait_until(lambda: nodes.trained(2))
    nodes.engine(1).terminate()
    assert nodes.end() == [0, 0]
    kinds = [event.kind for event in nodes.events(0)]
    assert (kinds[:2], kinds[-2:]) == (["log", "started"], ["checkpoint", "finished"])  # it logs which models it loads
    assert {"step", "spans", "samples"} < set(kinds)
    assert [finished(nodes.events(rank)[-1])[0] for rank in (0, 1)] == ["stopped", "stopped"]
    steps = [event for event in nodes.events(0) if event.kind == "step"]
    assert steps[0].device_seconds == pytest.approx(2 * steps[0].elapsed_s)
    loading, started, *rest = nodes.events(1)
    assert (loading.kind, started.kind) == ("log", "started")
    assert started.devices == ["node1/cpu:0"]
    assert {event.kind for event in rest} == {"spans", "finished"}


@pytest.mark.full
def test_scorer_processes_train_the_critic_together(world: Any, nodes: Nodes) -> None:
    """Stopped and resumed on two cores a node: the critic is trained in processes of their own, which meet apart."""
    nodes.start(world, world.tree(DEFER, TWO, {"steps": 10_000}), threads=2)
    nodes.wait_until(lambda: nodes.trained(2))
    nodes.engine(0).terminate()
    assert nodes.end() == [0, 0]
    (folder,) = (nodes.out / "checkpoints").iterdir()
    nodes.launched.clear()
    _, done = finished(nodes.events(0)[-1])
    nodes.start(world, world.tree(DEFER, TWO, {"steps": done + 2}), "--resume-from", str(folder), threads=2)
    assert nodes.end() == [0, 0]
    assert [finished(nodes.events(rank)[-1]) for rank in (0, 1)] == [("succeeded", done + 2)] * 2


def is_named(nodes: Nodes) -> bool:
    """Whether rank 0's last word names rank 1."""
    last = nodes.events(0)[-1]
    assert finished(last)[0] == "failed"
    return "rank 1 died, or gave no sign of life" in getattr(last, "reason", "")


@pytest.mark.full
def test_a_killed_rank_ends_the_other_which_names_it(world: Any, nodes: Nodes) -> None:
    nodes.start(world, world.tree(DEFER, TWO, {"steps": 10_000}), torchrun=False)
    nodes.wait_until(lambda: nodes.trained(1))
    nodes.launched[1].kill()
    assert nodes.end() == [1, -9]
    assert is_named(nodes)


@pytest.mark.full
def test_an_engine_ends_with_its_torchrun(world: Any, nodes: Nodes) -> None:
    nodes.start(world, world.tree(DEFER, TWO, {"steps": 10_000}), threads=2)
    nodes.wait_until(lambda: nodes.trained(1))
    engines = [nodes.engine(rank) for rank in (0, 1)]
    psutil.Process(nodes.launched[1].pid).kill()
    assert nodes.end() == [1, -9]
    assert is_named(nodes)
    nodes.wait_until(lambda: not any(engine.is_running() for engine in engines))


@pytest.fixture
def small_disk(nodes: Nodes) -> Iterator[Path]:
    """The nodes' folder of checkpoints, on a file system of its own with little room."""
    place = nodes.out / "checkpoints"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.full
def test_a_disk_that_fills_up_is_named_by_both_nodes_of_sharded_trainers(world: Any, nodes: Nodes, small_disk: Path) -> None:
    """Both write their shards in the background; the newest whole checkpoint stays."""
    changes: dict[str, Any] = {"steps": 10_000, "checkpoints": {"every_steps": 2}, "training": {"backend": "fsdp2"}}
    nodes.start(world, world.tree(DEFER, TWO, changes), torchrun=False)
    nodes.wait_until(lambda: any(event.kind == "checkpoint" for event in nodes.events(0)))
    with (small_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))
    assert nodes.end() == [1, 1]
    for rank in (0, 1):
        last = nodes.events(rank)[-1]
        assert last.kind == "finished"
        assert last.outcome == "failed"
        assert "no room for a checkpoint" in last.reason
    whole = [folder for folder in small_disk.iterdir() if folder.name.startswith("step-")]
    assert whole
    for folder in whole:
        check_intact(folder)
