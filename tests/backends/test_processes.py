"""Sharding backends in runs as they are started on nodes: DeepSpeed with scorers in processes of their own, FSDP2 without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.test_trainer_contract import BACKENDS, MISSING, Tree, case, write_world
from tests.engine.conftest import World
from tests.engine.distributed.test_torchrun import Nodes, finished, is_named
from tests.engine.distributed.test_torchrun import nodes as nodes  # the fixture

NEEDS_DEEPSPEED = pytest.mark.skipif(bool(MISSING), reason=MISSING)
DEFER = {"intra_step": "per_chunk", "inter_step": "defer", "overcommit": {"initial": 2, "min": 0, "max": 4}}


def streamed(folder: Path, backend: str, steps: int) -> tuple[World, Tree]:
    """A world below `folder`, and a run that streams and defers."""
    folder.mkdir()
    write_world(folder)
    changes = {"steps": steps, "overlap": DEFER, "checkpoints": {"every_steps": steps}}
    return World(folder), case("streamed", BACKENDS[backend], changes)["spec"]


@pytest.mark.parametrize("backend", [pytest.param("deepspeed-zero1", marks=NEEDS_DEEPSPEED), "fsdp2"])
def test_under_torchrun_a_run_stops_and_resumes(nodes: Nodes, tmp_path: Path, backend: str) -> None:
    world, tree = streamed(tmp_path / "world", backend, 10_000)
    nodes.start(world, tree, threads=2)
    nodes.wait_until(lambda: nodes.trained(2))
    nodes.engine(1).terminate()
    assert nodes.end() == [0, 0]
    (folder,) = (nodes.out / "checkpoints").iterdir()
    nodes.launched.clear()
    outcome, done = finished(nodes.events(0)[-1])
    assert outcome == "stopped"
    nodes.start(world, tree | {"steps": done + 2}, "--resume-from", str(folder), threads=2)
    assert nodes.end() == [0, 0]
    assert [finished(nodes.events(rank)[-1]) for rank in (0, 1)] == [("succeeded", done + 2)] * 2


@pytest.mark.parametrize(
    "backend", [pytest.param("deepspeed-zero2", marks=NEEDS_DEEPSPEED), pytest.param("fsdp2", marks=pytest.mark.full)]
)
def test_a_killed_rank_ends_the_other_which_names_it(nodes: Nodes, tmp_path: Path, backend: str) -> None:
    world, tree = streamed(tmp_path / "world", backend, 10_000)
    nodes.start(world, tree, torchrun=False)
    nodes.wait_until(lambda: nodes.trained(1))
    nodes.launched[1].kill()
    assert nodes.end() == [1, -9]
    assert is_named(nodes)
