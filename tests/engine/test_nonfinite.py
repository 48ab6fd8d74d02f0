"""What follows a fault that is not finite, whichever role meets it: the run ends, skips the step, or goes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from oppo_core.ppo import actor as actor_module
from oppo_core.ppo import critic as critic_module
from oppo_core.ppo.optimizer import NonFiniteError

PLAIN: dict[str, Any] = {
    "steps": 5, "overlap": {"intra_step": "off"}, "checkpoints": {"every_steps": 1, "keep": 100},
    "ppo": {"epochs": 2, "mini_batches": 2, "ema_decay": 0.9},
}  # fmt: skip
ROLES = ("actor", "critic")
LOSSES = {"actor": (actor_module, "policy_loss"), "critic": (critic_module, "value_loss")}


@contextmanager
def broken(role: str, calls: Callable[[int], bool]) -> Iterator[list[int]]:
    """The role's loss is NaN in those of its calls, counted from 0, that `calls` picks; gives the count of calls."""
    module, name = LOSSES[role]
    plain, count = getattr(module, name), [0]

    def loss(*arguments: Any) -> Any:
        losses, clipped = plain(*arguments)
        count[0] += 1
        return (losses * float("nan") if calls(count[0] - 1) else losses), clipped

    with mock.patch.object(module, name, loss):
        yield count


def calls_before(world: Any, out: Path, role: str, steps: int) -> int:
    """How often the role's loss is called in the first `steps` steps."""
    with broken(role, lambda call: False) as count:
        world.run(world.spec(PLAIN, {"steps": steps}), out)
    return count[0]


def told(run: Any, kind: str) -> list[Any]:
    return [event for event in run.events if event.kind == kind]


def faults(run: Any) -> list[tuple[int, int, int]]:
    return [(e.step, e.old, e.new) for e in told(run, "decision") if e.controller == "nonfinite"]


@pytest.mark.parametrize("role", ROLES)
def test_a_skipped_step_moves_neither_role(world: Any, tmp_path: Path, role: str) -> None:
    """The fault comes in the last mini-batch but one of step 3, after some of the step's optimizer steps."""
    late = calls_before(world, tmp_path / "count", role, 3) - 2
    spec = world.spec(PLAIN, {"ppo": {"on_nonfinite": "skip"}})
    with broken(role, lambda call: call == late):
        run = world.run(spec, tmp_path / "run")
    assert faults(run) == [(3, 3, 4)]
    (decision,) = [e for e in told(run, "decision") if e.controller == "nonfinite"]
    assert f"skip: the {'policy' if role == 'actor' else 'value'} loss is nan at step 3" in decision.reason
    assert [e.step for e in told(run, "step")] == [1, 2, 4, 5]
    assert [e.metrics["oppo/nonfinite_steps"] for e in told(run, "step")] == [0, 0, 1, 1]
    for other in ROLES:
        before, after, later = (run.weights(other, step) for step in (2, 3, 4))
        assert all(torch.equal(before[name], after[name]) for name in before), other
        assert any(not torch.equal(before[name], later[name]) for name in before), other
    for name in ("actor-optimizer.safetensors", "critic-optimizer.safetensors", "actor-ema/model.safetensors"):
        two, three = (run.out / "checkpoints" / f"step-{step:08d}" / name for step in (2, 3))
        assert two.read_bytes() == three.read_bytes(), name


def test_until_something_is_not_finite_a_careful_run_is_the_plain_one(world: Any, tmp_path: Path) -> None:
    runs = [world.run(world.spec(PLAIN, {"ppo": {"on_nonfinite": how}}), tmp_path / how) for how in ("raise", "skip", "rollback")]
    for run in runs[1:]:
        for role in ROLES:
            assert all(torch.equal(run.weights(role)[name], weight) for name, weight in runs[0].weights(role).items())


@pytest.mark.parametrize("threads", [1, 2])
def test_scores_that_are_never_finite_end_the_run_at_the_limit(world: Any, tmp_path: Path, threads: int) -> None:
    """With the scorers in this process, and in one of their own."""
    overlap = {"overlap": {"intra_step": "per_chunk" if threads > 1 else "off"}}
    reward = {"models": {"reward": {"model": {"path": "nan-reward"}}}, "ppo": {"on_nonfinite": "skip", "nonfinite_limit": 2}}
    status, events = world.main(world.tree(PLAIN, overlap, reward), tmp_path, threads=threads)
    assert status == 1
    assert events[-1].reason.startswith("NonFiniteError: the score of sequence")
    assert "(2 such steps in a row" in events[-1].reason
    assert events[-1].step == 1


@pytest.mark.parametrize(
    "inter", [{"overlap": {"intra_step": "off"}}, {"overlap": {"intra_step": "per_chunk", "inter_step": "defer"}}]
)
def test_a_rollback_goes_back_to_the_checkpoint_and_on_with_other_numbers(world: Any, tmp_path: Path, inter: Any) -> None:
    late = calls_before(world, tmp_path / "count", "actor", 3) - 2
    changes = {"ppo": {"on_nonfinite": "rollback", "epochs": 2}, "checkpoints": {"every_steps": 2}}
    spec = world.spec(PLAIN, changes, inter)
    with broken("actor", lambda call: call == late):
        run = world.run(spec, tmp_path / "run", inline=spec.overlap.intra_step != "off")
    assert faults(run) == [(3, 3, 3)]
    assert [e.step for e in told(run, "step")] == [1, 2, 3, 4, 5]
    trained = [i for step in run.steps for i in step.tokens]
    assert len(set(trained)) == len(trained) == 5 * spec.ppo.batch_size, "an answer was trained twice"
    lost = run.engine.pool.started - len(trained) - len(run.engine.pool.sequences)
    assert lost >= 1, "the same answers were sampled again"
    assert run.engine.progress.nonfinite_row == 0
    for role in ROLES:
        two, four = run.weights(role, 2), run.weights(role, 4)
        assert any(not torch.equal(two[name], four[name]) for name in two)


def test_a_rollback_takes_weights_and_pool_from_the_checkpoint(world: Any, tmp_path: Path) -> None:
    """Steps 3 and 4 were trained after the checkpoint of step 2: they are told again, and the weights are those of step 2."""
    late = calls_before(world, tmp_path / "count", "critic", 5) - 1
    changes = {"steps": 5, "ppo": {"on_nonfinite": "rollback", "nonfinite_limit": 2}, "checkpoints": {"every_steps": 3}}
    with broken("critic", lambda call: call == late):
        run = world.run(world.spec(PLAIN, changes), tmp_path / "run")
    assert faults(run) == [(5, 5, 4)]
    assert [e.step for e in told(run, "step")] == [1, 2, 3, 4, 4, 5]
    again = world.run(world.spec(PLAIN, changes), tmp_path / "same")
    first, second = (step.tokens for step in run.steps[3:5])
    assert first == again.steps[3].tokens
    assert first != second


def test_a_fault_that_comes_again_ends_a_run_that_rolls_back(world: Any, tmp_path: Path) -> None:
    late = calls_before(world, tmp_path / "count", "actor", 3) - 2
    spec = world.spec(PLAIN, {"ppo": {"on_nonfinite": "rollback"}})
    with broken("actor", lambda call: call >= late), pytest.raises(NonFiniteError, match=r"step 3; .* \(3 such steps in a row"):
        world.run(spec, tmp_path / "run")
    with broken("actor", lambda call: True), pytest.raises(NonFiniteError, match="no checkpoint to go back to yet"):
        world.run(spec, tmp_path / "first")


def test_raise_names_the_step(world: Any, tmp_path: Path) -> None:
    for role, name in (("actor", "policy"), ("critic", "value")):
        late = calls_before(world, tmp_path / f"count-{role}", role, 2) - 1
        with (
            broken(role, lambda call, late=late: call == late),
            pytest.raises(NonFiniteError, match=f"{name} loss is nan at step 2"),
        ):
            world.run(world.spec(PLAIN), tmp_path / role)
