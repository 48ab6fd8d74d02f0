"""What follows a fault that is not finite, whichever role meets it: the run ends, skips the step, or goes back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from oppo_contract.events import parse_event
from oppo_core.ppo import actor as actor_module
from oppo_core.ppo import critic as critic_module
from oppo_core.ppo.optimizer import NonFiniteError
from oppo_core.train import train

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


def newest(out: Path) -> Path:
    return max((out / "checkpoints").iterdir())


def rolling(world: Any, *changes: Any) -> Any:
    return world.spec(PLAIN, {"ppo": {"on_nonfinite": "rollback"}}, *changes)


def test_a_rollback_passes_over_damaged_half_done_and_later_checkpoints(world: Any, tmp_path: Path) -> None:
    """Beside those of steps 1 to 3 lie a half-done step and a later one of a former attempt; 3 is damaged, 2 is cut short."""
    late = calls_before(world, tmp_path / "count", "actor", 4) - 1
    out = tmp_path / "run"
    world.run(rolling(world, {"steps": 3}), out)
    folders = [out / "checkpoints" / f"step-{step:08d}" for step in (1, 2, 3)]
    for name in ("step-00000003-chunk-000002", "step-00000007"):
        shutil.copytree(folders[2], folders[2].with_name(name))
    engine = world.assemble(rolling(world), out, resume=folders[2])
    weights = folders[2] / "critic.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    (folders[1] / "state.json").unlink()
    steps_so_far = calls_before(world, tmp_path / "again", "actor", 3)
    with broken("actor", lambda call: call == late - steps_so_far):
        train(engine, lambda: False)
    engine.scorers.close()
    engine.journal.close()
    events = [parse_event(line) for line in (out / "events.jsonl").read_bytes().splitlines()]
    (decision,) = [e for e in events if e.kind == "decision" and e.controller == "nonfinite"]
    assert (decision.step, decision.new) == (4, 2)
    (log,) = [e for e in events if e.kind == "log" and e.stream == "stderr"]
    assert [any(word in line for line in log.lines[1:]) for word in ("critic.safetensors", "state.json")] == [True, True]
    assert [e.step for e in events if e.kind == "step"] == [1, 2, 3, 2, 3, 4, 5]


def test_without_a_sound_checkpoint_the_run_ends_and_names_the_damage(world: Any, tmp_path: Path) -> None:
    late = calls_before(world, tmp_path / "count", "actor", 2) - 1
    out = tmp_path / "run"

    def fails(call: int) -> bool:
        for folder in (out / "checkpoints").glob("step-*"):
            (folder / "state.json").unlink(missing_ok=True)
        return call == late

    with broken("actor", fails), pytest.raises(NonFiniteError, match=r"no checkpoint to go back to yet; .*state.json is missing"):
        world.run(rolling(world), out)


def test_after_a_rollback_a_stop_saves_which_numbers_were_used(world: Any, tmp_path: Path) -> None:
    """The checkpoint that the run went back to knows of fewer: resumed from there it would draw them again."""
    spec = rolling(world, {"checkpoints": {"every_steps": 1000}})
    first = world.run(spec, tmp_path, stop_after=2)
    with broken("actor", lambda call: call == 0) as count:
        run = world.run(spec, tmp_path, resume=newest(first.out), should_stop=lambda: count[0] > 0)
    assert faults(run) == [(3, 3, 3)]
    resumed = world.run(spec, tmp_path, resume=newest(run.out))
    carried = {s.sequence_id for s in run.engine.pool.sequences}
    again = {i for step in resumed.steps for i in step.tokens if i < run.engine.pool.started} - carried
    assert again == set(), "the numbers of the step that failed were drawn again"
    assert [e.metrics["oppo/nonfinite_steps"] for e in told(resumed, "step")][-1] == 1


@pytest.mark.parametrize("role", ROLES)
def test_forward_passes_that_were_kept_are_used_once_or_let_go(world: Any, tmp_path: Path, role: str) -> None:
    """With one optimizer step a batch the step's first pass serves the update too, on trial as well; a fault drops it."""
    one = {"steps": 3, "ppo": {"epochs": 1, "mini_batches": 1}}
    plain = world.run(world.spec(PLAIN, one), tmp_path / "plain")
    hold = mock.Mock(wraps=critic_module.HeldForward)
    with mock.patch.object(critic_module, "HeldForward", hold):
        careful = world.run(world.spec(PLAIN, one, {"ppo": {"on_nonfinite": "skip"}}), tmp_path / "careful")
    assert hold.call_count == 3, "the critic read its batch twice"
    for other in ROLES:
        assert all(torch.equal(careful.weights(other)[name], weight) for name, weight in plain.weights(other).items())
    last = calls_before(world, tmp_path / "count", role, 3) - 1
    with broken(role, lambda call: call >= last // 3):
        faulty = world.run(world.spec(PLAIN, one, {"ppo": {"on_nonfinite": "skip"}, "steps": 2}), tmp_path / "faulty")
    assert faulty.engine.actor._held is None
    assert faulty.engine.scorers._held is None
