"""Killed at any moment and resumed, a run ends with the very bits of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from oppo_contract.events import parse_event
from oppo_core.checkpoint import CheckpointError, verify
from oppo_core.journal import Journal

STEPS, EVERY = 16, 4
COMMON = {"steps": STEPS, "checkpoints": {"every_steps": EVERY, "keep": 2}, "resources": {"dtype": "float32"}}
# State that a checkpoint must hold besides weights, moments and the pool.
CARRIED = {"normalize_scores": "running", "schedule": "cosine", "value_warmup_steps": 2}
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "sequential": ({"overlap": {"intra_step": "off", "inter_step": "off"}, "ppo": {"epochs": 2, "mini_batches": 2} | CARRIED}, 1),
    "groups": (
        {
            "ppo": {"algorithm": "grpo", "group_size": 3, "batch_size": 2, "critic_learning_rate": 1e-5},
            "models": {"critic": "actor"},
            "overlap": {"overcommit": {"initial": 1, "max": 2}},
        },
        2,
    ),
    "tail batch": ({"overlap": {"inter_step": "tail_batch"}}, 2),
    "oppo": ({"overlap": {"intra_step": "per_chunk", "inter_step": "defer"}, "ppo": {"kl": {"controller": "adaptive"}}}, 2),
}
# Metrics that tell of time, and so differ from run to run.
TIMED = ("timing_s/", "perf/", "busy/", "bubble/", "idle_s/", "overlap_factor")


@pytest.fixture(scope="module", params=sorted(MODES))
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(world: Any, mode: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    changes, threads = MODES[mode]
    return world.run(world.spec(COMMON, changes), tmp_path_factory.mktemp(mode), threads=threads)


def learned(events: list[Any]) -> dict[tuple[int, str], str]:
    """Every metric of every step but those of time, to the last bit; a later report of a step replaces an earlier one."""
    steps = {event.step: event.metrics for event in events if event.kind == "step"}
    return {(step, k): repr(v) for step, metrics in steps.items() for k, v in metrics.items() if not k.startswith(TIMED)}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def newest(out: Path) -> Path:
    return sorted((out / "checkpoints").glob("step-*"))[-1]


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def kill_at(world: Any, tree: Any, out: Path, threads: int, step: int, resume: Path | None = None) -> None:
    """SIGKILL the engine after it told of `step`; its scorers must end by themselves."""
    engine = world.start(tree, out, threads, resume)
    engine.step(step)
    below = psutil.Process(engine.process.pid).children(recursive=True)
    assert len(below) >= threads - 1, "no scorer process was running"
    os.kill(engine.process.pid, signal.SIGKILL)
    assert engine.end()[0] == -signal.SIGKILL
    _, left = psutil.wait_procs(below, timeout=30)
    assert all(gone(process) for process in left), "a process outlived the engine"


def check_against(undisturbed: Any, world: Any, out: Path, events: list[Any]) -> None:
    """The same weights and the same metrics, to the last bit, and events numbered without a gap."""
    for role in ("actor", "critic"):
        if role == "actor" or undisturbed.engine.spec.ppo.has_critic:
            assert same_bits(undisturbed.weights(role), world.weights(out, role)), role
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    ours, wanted = learned(events), learned(undisturbed.events)
    assert {key: (ours.get(key), wanted.get(key)) for key in ours | wanted if ours.get(key) != wanted.get(key)} == {}


def test_killed_and_resumed_ends_with_the_same_bits(world: Any, mode: str, undisturbed: Any, tmp_path: Path) -> None:
    changes, threads = MODES[mode]
    tree = world.tree(COMMON, changes)
    kill_at(world, tree, tmp_path, threads, random.Random(mode).randrange(EVERY + 1, STEPS - EVERY))
    start = newest(tmp_path)
    state = json.loads((start / "state.json").read_text())
    carried, defers = state["pool"], mode in ("oppo", "groups")
    assert bool(carried) == defers, "the checkpoint should hold half-finished answers exactly when some are deferred"
    assert any(row["response"] and not row["finished"] for row in carried) == defers
    assert bool(state["queue"]) == (mode == "tail batch")
    resumed = world.start(tree, tmp_path, threads, resume=start)
    status, errors = resumed.end()
    assert status == 0, errors
    starts = [event.start_step for event in resumed.events if event.kind == "started"]
    assert starts == [0, int(start.name.removeprefix("step-"))]
    assert resumed.events[-1].outcome == "succeeded"
    check_against(undisturbed, world, tmp_path, resumed.events)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again(world: Any, mode: str, undisturbed: Any, tmp_path: Path, seed: int) -> None:
    changes, threads = MODES[mode]
    tree, draw, resume, step = world.tree(COMMON, changes), random.Random(seed), None, 0
    while step < STEPS - EVERY:
        step = draw.randrange(max(step, EVERY) + 1, STEPS)
        kill_at(world, tree, tmp_path, threads, step, resume)
        resume = newest(tmp_path)
    resumed = world.start(tree, tmp_path, threads, resume)
    assert resumed.end()[0] == 0
    check_against(undisturbed, world, tmp_path, resumed.events)


def test_asked_to_stop_it_finishes_the_step_and_goes_on_later(world: Any, tmp_path: Path) -> None:
    """SIGTERM, wherever it comes: a checkpoint of the last told step, `stopped`, status 0. Sequential PPO: the same bits."""
    changes, threads = MODES["sequential"]
    tree = world.tree(COMMON, changes, {"checkpoints": {"every_steps": 1000}})
    engine = world.start(tree, tmp_path, threads)
    engine.step(5)
    engine.process.send_signal(signal.SIGTERM)
    status, errors = engine.end()
    assert status == 0, errors
    last = engine.events[-1]
    told = max(event.step for event in engine.events if event.kind == "step")
    assert (last.kind, last.outcome, last.step, last.unconsumed) == ("finished", "stopped", told, 0)
    assert 5 <= told < STEPS, "it should have stopped early"
    assert newest(tmp_path).name == f"step-{told:08d}"
    status, events = world.main(tree, tmp_path, "--resume-from", newest(tmp_path))
    assert (status, events[-1].outcome) == (0, "succeeded")
    plain = world.run(world.spec(COMMON, changes, {"checkpoints": {"every_steps": 1000}}), tmp_path / "plain")
    check_against(plain, world, tmp_path, events)


@pytest.mark.parametrize("step", [3, 9])
def test_stopped_between_checkpoints_a_streamed_run_goes_on_within_rounding(world: Any, tmp_path: Path, step: int) -> None:
    """A checkpoint makes the scorers read deferred answers anew. Where the undisturbed run wrote none, that rounds otherwise."""
    spec = world.spec({"steps": 12, "overlap": {"intra_step": "per_chunk", "inter_step": "defer"}})
    plain = world.run(spec, tmp_path / "plain", inline=True)
    stopped = world.run(spec, tmp_path / "stopped", inline=True, stop_after=step)
    assert stopped.reason == "asked to stop"
    resumed = world.run(spec, tmp_path / "stopped", inline=True, resume=newest(tmp_path / "stopped"))
    assert [s.tokens for s in stopped.steps + resumed.steps] == [s.tokens for s in plain.steps]
    for role in ("actor", "critic"):
        for name, weight in plain.weights(role).items():
            torch.testing.assert_close(resumed.weights(role)[name], weight, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def checkpoint(world: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The plain spec of a short run, and its checkpoint."""
    changes = {"steps": 2, "overlap": {"intra_step": "off"}}
    run = world.run(world.spec(changes), tmp_path_factory.mktemp("short"))
    return world.tree(changes, {"steps": 3}), newest(run.out)


def refused(world: Any, tree: Any, out: Path, folder: Path) -> str:
    """Resume, expect a refusal, return its reason."""
    status, events = world.main(tree, out, "--resume-from", folder)
    assert status == 1
    assert [event.kind for event in events] == ["finished"], "it started training"
    assert events[-1].outcome == "failed"
    return str(events[-1].reason)


@pytest.mark.parametrize("name", ["actor/model.safetensors", "critic.safetensors", "critic-optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_file_is_refused_by_name(world: Any, checkpoint: Any, tmp_path: Path, name: str, damage: str) -> None:
    tree, whole = checkpoint
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(bytes(content) if damage == "flip" else bytes(content[: len(content) // 2]))
    reason = refused(world, tree, tmp_path / "out", folder)
    assert reason.startswith("CheckpointError")
    assert name in reason


def test_what_is_no_checkpoint_is_refused(world: Any, checkpoint: Any, tmp_path: Path) -> None:
    tree, whole = checkpoint
    assert "manifest.json" in refused(world, tree, tmp_path / "a", tmp_path / "nowhere")
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    (folder / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in refused(world, tree, tmp_path / "b", folder)


def test_another_spec_is_refused_and_more_steps_are_not(world: Any, checkpoint: Any, tmp_path: Path) -> None:
    tree, whole = checkpoint
    for section, key, value in (("ppo", "learning_rate", 1e-4), ("overlap", "max_age", 3), ("rollout", "temperature", 0.5)):
        changed = {**tree, section: {**tree[section], key: value}}
        assert f"another {section};" in refused(world, changed, tmp_path / key, whole)
    assert "another seed;" in refused(world, {**tree, "seed": 99}, tmp_path / "seed", whole)
    assert "another models;" in refused(
        world, {**tree, "models": {**tree["models"], "critic": "actor"}}, tmp_path / "models", whole
    )
    more = {**tree, "name": "longer", "logging": {"samples_per_step": 0}, "checkpoints": {"every_steps": 1}}
    status, events = world.main(more, tmp_path / "more", "--resume-from", whole)
    assert (status, events[-1].outcome, events[-1].step) == (0, "succeeded", 3)


def test_every_kept_checkpoint_is_whole_and_only_the_newest_are_kept(undisturbed: Any) -> None:
    folders = sorted((undisturbed.out / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == [f"step-{step:08d}" for step in (STEPS - EVERY, STEPS)]
    for folder in folders:
        verify(folder, undisturbed.engine.spec)
    with pytest.raises(CheckpointError):
        verify(folders[0].parent, undisturbed.engine.spec)
    told = [event.step for event in undisturbed.events if event.kind == "checkpoint"]
    assert told == list(range(EVERY, STEPS + 1, EVERY))


def test_a_torn_last_line_is_cut_and_numbering_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    for step in (1, 2):
        journal.write("decision", step=step, controller="chunk", old=1, new=2, reason="Δ ≥ 1")
    journal.close()
    whole = path.read_bytes()
    for torn in (whole[:-1], whole[:-20], whole + b"{", whole + b'{"kind": "step", "prod', whole[: whole.index(b"\n") + 1]):
        path.write_bytes(torn)
        journal = Journal(path)
        journal.write("decision", step=3, controller="chunk", old=2, new=2, reason="kept")
        journal.close()
        events = [parse_event(line) for line in path.read_bytes().splitlines()]
        assert [event.seq for event in events] == list(range(1, torn.count(b"\n") + 2))
        assert events[-1].step == 3
