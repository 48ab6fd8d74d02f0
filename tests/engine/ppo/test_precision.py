"""bfloat16 weights: steps below their resolution accumulate, and a resumed run is bitwise identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oppo_contract.spec import ModelSpec
from oppo_core.engine.layout import LayoutError, select_device
from oppo_core.models.model_io import load_model
from oppo_core.rollout.decoder import Decoder, DecodeSettings
from oppo_core.rollout.sequence import Sequence
from oppo_core.training.lr_schedule import Rates
from oppo_core.training.optimizer import Optimizer

HALF = {"resources": {"dtype": "bfloat16"}, "steps": 4, "checkpoints": {"every_steps": 2, "keep": 9}}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_steps_below_a_weights_resolution_add_up() -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = Optimizer([weight], Rates(1e-4), 0.0, 10.0)
    for step in range(200):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.apply(step, "actor")
    assert torch.allclose(weight.float(), torch.full((3,), 0.98), atol=1 / 256)


def test_a_deleted_optimizer_takes_no_gradients() -> None:
    """In the GPU bench the engines of all variants create optimizers over the same network."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    other, optimizer = (Optimizer([weight], Rates(1e-4), 0.0, 10.0) for _ in range(2))
    del other
    for _ in range(2):
        (2 * weight).sum().backward()
    assert torch.equal(optimizer.masters[0].grad, torch.full((3,), 4.0))


def test_float32_gradients_are_freed_by_the_step() -> None:
    """They would take four bytes per weight next to the next update's activations."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = Optimizer([weight], Rates(1e-4), 0.0, 10.0)
    weight.sum().backward()
    optimizer.apply(0, "actor")
    assert [master.grad for master in optimizer.masters] == [None]


def test_gradients_of_many_passes_are_summed_in_float32() -> None:
    """1 + 1/512 is 1 in bfloat16: 512 passes would add nothing to the first one's gradient."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = Optimizer([weight], Rates(1e-4), 0.0, 1e9)
    optimizer.begin(513)
    for scale in [1.0] + [1 / 512] * 512:
        optimizer.backward((scale * weight).sum())
        assert weight.grad is None, "no short gradient is kept"
    assert optimizer.apply(0, "actor") == pytest.approx(2 * 3**0.5, rel=1e-6)


def test_a_run_in_bfloat16_learns_and_resumes_with_the_same_bits(world: Any, tmp_path: Path) -> None:
    spec = world.spec(HALF)
    whole = world.run(spec, tmp_path / "whole")
    resumed = world.run(spec, tmp_path / "resumed", resume=tmp_path / "whole" / "checkpoints" / "step-00000002")
    for role in ("actor", "critic"):
        assert same_bits(whole.weights(role), resumed.weights(role))
        assert not same_bits(whole.weights(role), world.first_weights(spec, role))


def test_stale_tokens_are_scored_as_precisely_as_they_are_sampled(world: Any) -> None:
    """A log-prob rounded to eight bits would weigh a stale token wrongly by a percent or more."""
    actor = load_model(ModelSpec(path="actor"), "lm", [world.folder], torch.bfloat16, 0)
    decoder = Decoder(actor, DecodeSettings(3, 2, 1.0, 12, 60, 400, scores_stale_tokens=True), 4)
    sequences = [Sequence(i, 0, np.asarray([3 + i, 7])) for i in range(4)]
    decoder.begin(sequences)
    for _ in range(12):
        decoder.round(0)
    going_on = list(decoder.live)
    decoder.begin(going_on)
    rated = torch.tensor([logprob for s in going_on for logprob in s.stale_logprobs])
    sampled = torch.tensor([logprob for s in going_on for logprob in s.behaviour_logprobs])
    assert len(rated) > 12
    assert (rated.bfloat16().float() != rated).float().mean() > 0.9, "rounded to bfloat16"
    torch.testing.assert_close(rated, sampled, rtol=0, atol=0.15)  # states in bfloat16, in one pass and one by one


def test_on_a_gpu_deepspeed_does_not_stream(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two engines would run collectives from two threads."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    sharded = {"training": {"backend": "deepspeed"}, "resources": {"dtype": "float32"}}
    with pytest.raises(LayoutError, match=r"deepspeed on a GPU.* set overlap\.intra_step to off"):
        select_device(world.spec(sharded, {"overlap": {"intra_step": "per_chunk"}}))
    assert select_device(world.spec(sharded, {"overlap": {"intra_step": "off"}})).type == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_reported(world: Any) -> None:
    with pytest.raises(LayoutError, match="no GPU"):
        select_device(world.spec({"resources": {"kind": "cuda"}}))
    assert select_device(world.spec({"resources": {"kind": "any"}})).type == "cpu"
