"""Gradients accumulated before the batch is complete equal those of the whole policy loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oppo_core.ppo.deferred_metrics import TokenSums
from oppo_core.ppo.early_gradients import EarlyGradients

SETTINGS: dict[str, dict[str, Any]] = {
    "whitened": {},
    "unwhitened": {"whiten_advantages": False},
    "regularized": {"entropy_coefficient": 0.01, "kl": {"placement": "loss", "estimator": "k3"}, "dual_clip": 3.0},
}
KL_COEFFICIENT = 0.1


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_combined_early_gradients_equal_the_gradient_of_the_loss(world: Any, tmp_path: Path, name: str) -> None:
    spec = world.spec({"steps": 1, "overlap": {"intra_step": "off"}, "ppo": SETTINGS[name]})
    e = world.run(spec, tmp_path / "run").steps[0].experience
    engine = world.assemble(spec, tmp_path / "fresh")
    trainer, rows, tokens = engine.actor, list(range(len(e.sequences))), int(e.mask.sum())
    sums, supports = TokenSums(), [s.support for s in e.sequences]
    trainer.accumulate(e, rows, KL_COEFFICIENT, tokens, sums, 0)
    expected = trainer.optimizer.take_gradients()
    early = EarlyGradients.shared(trainer)
    early.add(trainer, e, trainer.forward(e.tokens, e.prompt_lengths, supports=supports), KL_COEFFICIENT)
    mean, scale = e.whitening
    part = early.combine(rows, mean, scale, tokens)
    for gradient, wanted in zip(part.gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-7, atol=1e-10)
    assert (part.loss, part.entropy) == pytest.approx((sums.loss, sums.entropy), rel=1e-7, abs=1e-9)
    again = early.combine([], mean, scale, tokens)
    assert not any(gradient.any() for gradient in again.gradients)
    assert (again.loss, again.entropy) == (0, 0)
    engine.scorers.close()
