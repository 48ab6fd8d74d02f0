"""A non-finite loss or gradient of either role ends the run or skips the step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from oppo_core.checkpointing.atomic_dir import MANIFEST, sha256
from oppo_core.ppo import critic as critic_module
from oppo_core.ppo import policy_objective
from oppo_core.training.optimizer import NonFiniteError

PLAIN: dict[str, Any] = {
    "steps": 5, "overlap": {"intra_step": "off"}, "checkpoints": {"every_steps": 1, "keep": 100},
    "ppo": {"epochs": 2, "mini_batches": 2, "ema_decay": 0.9},
}  # fmt: skip
ROLES = ("actor", "critic")
LOSSES = {"actor": (policy_objective, "policy_loss"), "critic": (critic_module, "value_loss")}


@contextmanager
def broken(role: str, calls: Callable[[int], bool], what: str = "loss") -> Iterator[list[int]]:
    """Make the role's loss, or only its gradient, NaN in the calls (from 0) that `calls` selects; yields the call count."""
    module, name = LOSSES[role]
    plain, count = getattr(module, name), [0]

    def loss(*arguments: Any) -> Any:
        losses, clipped = plain(*arguments)
        count[0] += 1
        if not calls(count[0] - 1):
            return losses, clipped
        return (losses * math.nan if what == "loss" else losses + 0 * (losses - losses).sqrt()), clipped

    with mock.patch.object(module, name, loss):
        yield count


def calls_before(world: Any, out: Path, role: str, steps: int) -> int:
    """Number of calls of the role's loss in the first `steps` steps."""
    with broken(role, lambda call: False) as count:
        world.run(world.spec(PLAIN, {"steps": steps}), out)
    return count[0]


def told(run: Any, kind: str) -> list[Any]:
    return [event for event in run.events if event.kind == kind]


def faults(run: Any) -> list[tuple[int, int, int]]:
    return [(e.step, e.old, e.new) for e in told(run, "decision") if e.controller == "nonfinite"]


def skipping(world: Any, *changes: Any) -> Any:
    return world.spec(PLAIN, {"ppo": {"on_nonfinite": "skip"}}, *changes)


def optimizer_steps(run: Any, role: str, step: int) -> int:
    """Optimizer steps taken by the role when a checkpoint was written."""
    name = f"{role}-optimizer.safetensors"
    return int(load_file(run.out / "checkpoints" / f"step-{step:08d}" / name)["0.step"])


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("role", ROLES)
def test_a_skipped_step_moves_neither_role(world: Any, tmp_path: Path, role: str, what: str) -> None:
    """The fault comes in the first of the four optimizer steps of step 3."""
    late = calls_before(world, tmp_path / "count", role, 2)
    with broken(role, lambda call: call == late, what):
        run = world.run(skipping(world), tmp_path / "run")
    assert faults(run) == [(3, 3, 4)]
    (decision,) = [e for e in told(run, "decision") if e.controller == "nonfinite"]
    name = {"actor": "policy", "critic": "value"}[role]
    said = f"the {name} loss is nan at step 3" if what == "loss" else f"the {role}'s gradient norm is nan at step 3"
    assert f"skip: {said}" in decision.reason
    assert [e.step for e in told(run, "step")] == [1, 2, 4, 5]
    assert [e.metrics["oppo/nonfinite_steps"] for e in told(run, "step")] == [0, 0, 1, 1]
    for other in ROLES:
        before, after, later = (run.weights(other, step) for step in (2, 3, 4))
        assert all(torch.equal(before[name], after[name]) for name in before), other
        assert any(not torch.equal(before[name], later[name]) for name in before), other
    for name in ("actor-optimizer.safetensors", "critic-optimizer.safetensors", "actor-ema/model.safetensors"):
        two, three = (run.out / "checkpoints" / f"step-{step:08d}" / name for step in (2, 3))
        assert two.read_bytes() == three.read_bytes(), name


@pytest.mark.parametrize("role", ROLES)
def test_earlier_optimizer_steps_of_a_skipped_step_stay(world: Any, tmp_path: Path, role: str) -> None:
    """The fault comes in the last of four optimizer steps: both roles have taken three."""
    late = calls_before(world, tmp_path / "count", role, 3) - 1
    with broken(role, lambda call: call == late):
        run = world.run(skipping(world), tmp_path / "run")
    assert faults(run) == [(3, 3, 4)]
    for other in ROLES:
        assert [optimizer_steps(run, other, step) for step in (2, 3, 4)] == [8, 11, 15], other
    average = [run.out / "checkpoints" / f"step-{step:08d}" / "actor-ema/model.safetensors" for step in (2, 3)]
    assert average[0].read_bytes() == average[1].read_bytes()


def test_a_scorer_process_steps_with_the_actor_or_not_at_all(world: Any, tmp_path: Path) -> None:
    streamed = {"overlap": {"intra_step": "per_chunk"}}
    late = calls_before(world, tmp_path / "count", "actor", 3) - 1
    with broken("actor", lambda call: call == late):
        run = world.run(skipping(world, streamed), tmp_path / "run", threads=2)
    assert run.engine.layout.streams
    assert faults(run) == [(3, 3, 4)]
    for other in ROLES:
        assert [optimizer_steps(run, other, step) for step in (2, 3, 4)] == [8, 11, 15], other


def test_a_critic_fault_during_critic_warmup_is_skipped(world: Any, tmp_path: Path) -> None:
    warmup = {"ppo": {"value_warmup_steps": 2}}
    with broken("critic", lambda call: call == 0):
        run = world.run(skipping(world, warmup), tmp_path / "run")
    assert faults(run) == [(1, 1, 2)]
    assert [optimizer_steps(run, "critic", step) for step in (2, 3)] == [4, 8]
    assert optimizer_steps(run, "actor", 3) == 4


def test_without_a_critic_the_actor_alone_is_skipped(world: Any, tmp_path: Path) -> None:
    groups = {
        "models": {"critic": "actor"}, "ppo": {"algorithm": "grpo", "group_size": 2, "critic_learning_rate": 1e-5},
        "overlap": {"overcommit": {"initial": 2, "max": 3}},
    }  # fmt: skip
    with broken("actor", lambda call: call == 0):
        run = world.run(skipping(world, groups, {"steps": 2}), tmp_path / "run")
    assert faults(run) == [(1, 1, 2)]
    assert optimizer_steps(run, "actor", 2) == 4


def test_a_skipping_run_equals_the_plain_one_until_a_fault(world: Any, tmp_path: Path) -> None:
    plain, skips = (world.run(world.spec(PLAIN, {"ppo": {"on_nonfinite": how}}), tmp_path / how) for how in ("raise", "skip"))
    for role in ROLES:
        assert all(torch.equal(skips.weights(role)[name], weight) for name, weight in plain.weights(role).items())
    assert [e.metrics["critic/vf_loss"] for e in told(skips, "step")] == [
        e.metrics["critic/vf_loss"] for e in told(plain, "step")
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_scores_that_are_never_finite_end_the_run_at_the_limit(world: Any, tmp_path: Path, threads: int) -> None:
    """With inline scorers and with a scorer process."""
    overlap = {"overlap": {"intra_step": "per_chunk" if threads > 1 else "off"}}
    reward = {"models": {"reward": {"model": {"path": "nan-reward"}}}, "ppo": {"on_nonfinite": "skip", "nonfinite_limit": 2}}
    status, events = world.main(world.tree(PLAIN, overlap, reward), tmp_path, threads=threads)
    assert status == 1
    assert events[-1].reason.startswith("NonFiniteError: the score of sequence")
    assert "(2 such steps in a row" in events[-1].reason
    assert events[-1].step == 1


def test_raise_names_the_step(world: Any, tmp_path: Path) -> None:
    for role, name in (("actor", "policy"), ("critic", "value")):
        late = calls_before(world, tmp_path / f"count-{role}", role, 2) - 1
        with (
            broken(role, lambda call, late=late: call == late),
            pytest.raises(NonFiniteError, match=f"{name} loss is nan at step 2"),
        ):
            world.run(world.spec(PLAIN), tmp_path / role)


def test_a_run_that_rolled_back_goes_on_with_skip(world: Any, tmp_path: Path) -> None:
    """Its checkpoint holds a retired value; its fault counts are kept."""
    first = world.run(skipping(world, {"steps": 2}), tmp_path)
    folder = max((first.out / "checkpoints").iterdir())
    state = json.loads((folder / "state.json").read_text())
    state["spec"]["ppo"]["on_nonfinite"] = "rollback"
    state["progress"] |= {"nonfinite_steps": 1, "nonfinite_row": 0, "nonfinite_at": 1}
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["state.json"]["sha256"] = sha256(folder / "state.json")
    (folder / MANIFEST).write_text(json.dumps(manifest))
    for how in ("skip", "raise"):
        run = world.run(world.spec(PLAIN, {"ppo": {"on_nonfinite": how}, "steps": 3}), tmp_path, resume=folder)
        assert [e.metrics["oppo/nonfinite_steps"] for e in told(run, "step")][-1] == 1


@pytest.mark.parametrize("role", ROLES)
def test_retained_forward_passes_are_used_once_or_released(world: Any, tmp_path: Path, role: str) -> None:
    """With one optimizer step per batch the first pass serves the update too, also stepwise; a fault drops it."""
    one = {"steps": 3, "ppo": {"epochs": 1, "mini_batches": 1}}
    plain = world.run(world.spec(PLAIN, one), tmp_path / "plain")
    hold = mock.Mock(wraps=critic_module.RetainedForward)
    with mock.patch.object(critic_module, "RetainedForward", hold):
        skips = world.run(world.spec(PLAIN, one, {"ppo": {"on_nonfinite": "skip"}}), tmp_path / "skips")
    assert hold.call_count == 3, "the critic read its batch twice"
    for other in ROLES:
        assert all(torch.equal(skips.weights(other)[name], weight) for name, weight in plain.weights(other).items())
    last = calls_before(world, tmp_path / "count", role, 3) - 1
    with broken(role, lambda call: call >= last // 3):
        faulty = world.run(world.spec(PLAIN, one, {"ppo": {"on_nonfinite": "skip"}, "steps": 2}), tmp_path / "faulty")
    assert faulty.engine.actor._retained is None
    assert faulty.engine.scorers._retained is None
