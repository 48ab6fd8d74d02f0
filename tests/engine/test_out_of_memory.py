"""Training that runs out of memory goes on in smaller passes, says so, and ends with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oppo_core.ppo.budget import MemoryShortError, PassBudget
from oppo_core.train import train


class Short:
    """Memory for so many padded tokens of a pass with a graph, and for none in the backward passes named by their number."""

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
        self._backward(loss)  # some gradients are there already when it fails
        if self.count in self._backwards:
            raise torch.OutOfMemoryError("no memory for gradients")


@pytest.mark.parametrize("changes", [{}, {"ppo": {"epochs": 2, "mini_batches": 2}}], ids=["one-pass", "epochs"])
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
    assert "ran out of memory; it goes on with 200 tokens a pass instead of 400" in caplog.text


def test_what_does_not_fit_row_by_row_ends_by_name() -> None:
    budget, seen = PassBudget(100, may_shrink=True), []

    def compute() -> None:
        seen.append(budget.tokens)
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with pytest.raises(MemoryShortError, match=r"the critic's update does not fit .* tried to allocate 2 GiB.* models\.lora"):
        budget.shrinking("the critic's update", compute)
    assert seen == [100, 50, 25, 16]


def test_where_other_ranks_count_on_the_passes_nothing_shrinks() -> None:
    def compute() -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        PassBudget(100, may_shrink=False).shrinking("the actor's update", compute)
