"""Forward passes that are retained for the update: they save passes and change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from oppo_core.ppo.actor import ActorTrainer


@pytest.mark.parametrize("changes", [{}, {"models": {"lora": {"rank": 4}}}], ids=["all weights", "adapters"])
def test_retained_passes_are_not_computed_twice(world: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    ones = {"steps": 2, "overlap": {"intra_step": "off"}, "ppo": {"epochs": 1, "mini_batches": 1, "micro_batch_tokens": 60}}
    runs, passes = [], []
    for retained in (0, 1, 2, 1000):
        forward = mock.Mock(wraps=ActorTrainer._forward)
        with mock.patch.object(ActorTrainer, "_forward", lambda *given, f=forward, **more: f(*given, **more)):
            spec = world.spec(ones, changes, {"training": {"retained_passes": retained}})
            runs.append(world.run(spec, tmp_path / str(retained)))
        passes.append(forward.call_count)
    whole = passes[-1]
    assert passes[0] == 2 * whole, "without a retained graph each pass is computed twice"
    assert whole < passes[2] < passes[1] < passes[0]
    for role in ("actor", "critic"):
        for run in runs[:-1]:
            assert all(torch.equal(weight, run.weights(role)[name]) for name, weight in runs[-1].weights(role).items())
