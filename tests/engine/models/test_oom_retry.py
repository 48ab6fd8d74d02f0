"""After an out-of-memory error a run continues with smaller passes, also when resumed, and ends with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oppo_contract.events import parse_event
from oppo_contract.spec import Retries
from oppo_core.models.oom_retry import MemoryShortError, PassBudget, Shrunk, limit
from oppo_core.train import train


class Short:
    """Simulated memory limit: padded tokens of a pass with a graph, and backward passes (by number) that fail."""

    def __init__(self, trainer: Any, tokens: int, backwards: tuple[int, ...] = ()) -> None:
        self._trainer, self._tokens, self._backwards = trainer, tokens, backwards
        self._hidden, self._backward = trainer.network.hidden, trainer.optimizer.backward
        self.count = 0
        trainer.network.hidden, trainer.optimizer.backward = self.hidden, self.backward

    def hidden(self, tokens_NT: Tensor, positions_NT: Tensor, window: Any = None) -> Tensor:
        if torch.is_grad_enabled() and tokens_NT.numel() > self._tokens:
            raise torch.OutOfMemoryError(f"no memory for {tokens_NT.numel()} tokens")
        result: Tensor = self._hidden(tokens_NT, positions_NT, window)
        return result

    def backward(self, loss: Tensor) -> None:
        self.count += 1
        self._backward(loss)  # after some gradients were accumulated
        if self.count in self._backwards:
            raise torch.OutOfMemoryError("no memory for gradients")


TEXTS = {"pretraining": {"data": "texts.jsonl", "sequences": 64}}


@pytest.mark.parametrize(
    "changes", [{}, {"ppo": {"epochs": 2, "mini_batches": 2}}, {"ppo": TEXTS}], ids=["one-pass", "epochs", "texts"]
)
def test_smaller_passes_lead_to_the_same_weights(
    world: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    spec = world.spec({"steps": 2, "overlap": {"intra_step": "off"}}, changes)
    plain = world.run(spec, tmp_path / "plain")
    engine = world.assemble(spec, tmp_path / "short")
    actor, critic = engine.actor, engine.scorers.trainer
    Short(actor, 300, backwards=(2, 3))
    Short(critic, 250, backwards=(1,))
    with world.recorded() as steps:
        train(engine, lambda: False)
    engine.scorers.close()
    engine.journal.close()
    assert actor.budget.tokens <= 200
    assert critic.budget.tokens <= 200
    for role in ("actor", "critic"):
        for name, weight in plain.weights(role).items():
            torch.testing.assert_close(weight, world.weights(tmp_path / "short", role)[name], rtol=0, atol=1e-9)
    for step, other in zip(steps, plain.steps, strict=True):
        for name in ("actor/pg_loss", "actor/entropy", "critic/vf_loss"):
            assert step.metrics[name] == pytest.approx(other.metrics[name], abs=1e-9)
    assert "took more than the GPU has; continuing with 200 tokens per pass instead of 400" in caplog.text


ROOM = 100  # padded tokens: the longest answer with its prompt fits


def without_room(network: Any) -> None:
    """Simulated memory limit of `ROOM` padded tokens for a pass without a graph."""
    own = network.hidden

    def hidden(tokens_NT: Tensor, positions_NT: Tensor, window: Any = None) -> Tensor:
        if not torch.is_grad_enabled() and tokens_NT.numel() > ROOM:
            raise torch.OutOfMemoryError(f"no memory for {tokens_NT.numel()} tokens")
        result: Tensor = own(tokens_NT, positions_NT, window)
        return result

    network.hidden = hidden


def test_scorer_and_prefill_budgets_shrink_and_stay_small_after_a_resume(world: Any, tmp_path: Path) -> None:
    spec = world.spec({"steps": 3, "ppo": {"micro_batch_tokens": 300}, "checkpoints": {"every_steps": 1, "keep": 5}})
    plain = world.run(spec, tmp_path / "plain", inline=True)
    with world.streaming_inline():
        engine = world.assemble(spec, tmp_path / "short")
    scorers = engine.scorers
    for network in (engine.actor.network, scorers.reference.network, scorers.critic.network, scorers.reward.streams[0].network):
        without_room(network)
    with world.recorded() as steps:
        train(engine, lambda: False)
    engine.scorers.close()
    engine.journal.close()
    for step, other in zip(steps, plain.steps, strict=True):
        assert step.tokens == other.tokens
    for role in ("actor", "critic"):
        for name, weight in plain.weights(role).items():
            torch.testing.assert_close(weight, world.weights(tmp_path / "short", role)[name], rtol=0, atol=1e-9)
    events = [parse_event(line) for line in (tmp_path / "short" / "events.jsonl").read_bytes().splitlines()]
    told = [e for e in events if e.kind == "decision" and e.controller == "memory"]
    now = {"the scorers' reading": 300.0, "the actor's prefill": 300.0, "the actor's forward pass": 300.0}
    for event in told:
        what = event.reason.partition(" ran out of memory: no memory for ")[0]
        assert (event.old, event.new) == (now[what], now[what] / 2)
        now[what] = event.new
    reads, prefill, actor = now.values()
    assert max(now.values()) < 300
    assert engine.progress.passes == {"reads": reads, "prefill": prefill, "actor": actor}
    resumed(world, spec, tmp_path, {"actor": actor, "prefill": prefill}, {"reads": reads, "critic": 300})
    named = world.spec({"steps": 3, "ppo": {"micro_batch_tokens": 250}, "checkpoints": {"every_steps": 1, "keep": 5}})
    resumed(world, named, tmp_path, {"actor": 250, "prefill": 250}, {"reads": 250, "critic": 250})


def resumed(world: Any, spec: Any, folder: Path, own: dict[str, int], scorers: dict[str, int]) -> None:
    """Budgets after resuming from the last step of the run that was short of memory."""
    with world.streaming_inline():
        engine = world.assemble(spec, folder / "resumed", resume=folder / "short" / "checkpoints" / "step-00000003")
    engine.scorers.close()
    engine.journal.close()
    assert {budget.name: budget.tokens for budget in engine.budgets} == own
    assert {budget.name: budget.tokens for budget in engine.scorers._budgets} == scorers


def test_a_budget_reports_its_reductions() -> None:
    told: list[Shrunk] = []
    budget = PassBudget(100, name="reads", on_shrink=told.append)

    def compute() -> int:
        if budget.tokens > 50:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return budget.tokens

    assert budget.run("the scorers' reading", compute) == 50
    assert told == [Shrunk("reads", 100, 50, "the scorers' reading ran out of memory: tried to allocate 2 GiB")]
    limit([budget], {"reads": 80, "prefill": 20})
    assert budget.tokens == 50
    limit([budget], {"reads": 20})
    assert budget.tokens == 20


def test_the_warning_matches_no_retry_rule(caplog: pytest.LogCaptureFixture) -> None:
    """Retry rules match the last log lines when the run later fails for another reason."""
    budget = PassBudget(100, name="reads")

    def compute() -> None:
        if budget.tokens > 50:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    budget.run("the scorers' reading", compute)
    assert "50 tokens per pass instead of 100" in caplog.text
    assert not [rule for rule in Retries().rules if rule.match.lower() in caplog.text.lower()]


def test_a_pass_that_does_not_fit_with_one_row_raises_an_error_that_names_it() -> None:
    budget, seen = PassBudget(100, may_shrink=True), []

    def compute() -> None:
        seen.append(budget.tokens)
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with pytest.raises(MemoryShortError, match=r"the critic's update does not fit .* tried to allocate 2 GiB.* models\.lora"):
        budget.run("the critic's update", compute)
    assert seen == [100, 50, 25, 16]


def test_budgets_of_sharded_training_do_not_shrink() -> None:
    def compute() -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with pytest.raises(MemoryShortError, match=r"the actor's update ran out of memory: tried to .* lower ppo.micro_batch_tokens"):
        PassBudget(100, may_shrink=False).run("the actor's update", compute)
