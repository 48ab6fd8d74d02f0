"""Heads of bfloat16 networks return float32 outputs that are not rounded to bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from oppo_contract.spec import ModelSpec
from oppo_core.models import upcast
from oppo_core.models.model_io import load_model
from oppo_core.models.upcast import linear_in_float32
from tests.engine.models.architectures import write_folders


@pytest.fixture(params=["cpu", "gpu"])
def device_kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A CPU, or the code for a GPU with a product that a CPU has."""
    if request.param == "cpu":
        yield
        return
    wide = mock.patch.object(upcast, "_product", lambda left, right: left.float() @ right.float())
    with wide, mock.patch.object(upcast, "_on_gpu", return_value=True):
        yield


@pytest.mark.usefixtures("device_kind")
@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradients_are_those_of_a_product_in_float32(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (20 * torch.randn(n, 16, generator=generator).bfloat16().requires_grad_() for n in (5, 7))
    offset = torch.randn(7, generator=generator).bfloat16() if bias else None
    out = linear_in_float32(hidden, weight, offset)
    wide = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    exact = torch.nn.functional.linear(*wide, None if offset is None else offset.float())
    assert out.dtype == torch.float32
    assert torch.equal(out, exact)
    assert float((out - out.bfloat16()).detach().abs().max()) > 0.5, "rounding to bfloat16 would be visible"
    gradients = torch.autograd.grad(out.square().sum(), [hidden, weight])
    for ours, theirs in zip(gradients, torch.autograd.grad(exact.square().sum(), wide), strict=True):
        assert ours.dtype == torch.bfloat16
        # A GPU rounds the output's gradient before it is multiplied.
        assert float((ours.float() - theirs).norm()) <= 2**-8 * float(theirs.norm())


@pytest.mark.usefixtures("device_kind")
def test_any_number_of_leading_dimensions() -> None:
    hidden, weight = torch.randn(2, 3, 4).bfloat16(), torch.randn(5, 4).bfloat16()
    exact = hidden.float() @ weight.float().T
    for states, expected in (
        (hidden, exact),
        (hidden[0], exact[0]),
        (hidden[0, 0], exact[0, 0]),
        (hidden.transpose(0, 1), exact.transpose(0, 1)),
    ):
        torch.testing.assert_close(linear_in_float32(states, weight), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_precisions_are_kept(dtype: torch.dtype) -> None:
    hidden, weight = torch.ones(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype)
    assert linear_in_float32(hidden, weight).dtype == dtype


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2"])
def test_heads_of_bfloat16_models_return_float32(tmp_path: Path, name: str) -> None:
    """Also with tied weights, a rule for logits, in a copy of the network, and in the model's own forward pass."""
    write_folders(name, tmp_path)
    heads: list[tuple[Any, str]] = [("lm", "actor"), ("scalar", "reward")]
    for head, folder in heads:
        network: Any = load_model(ModelSpec(path=str(tmp_path / folder)), head, [], torch.bfloat16, 0)
        hidden = torch.randn(3, network.width).bfloat16()
        for each in (network, copy.deepcopy(network)):
            out = each.logits(hidden) if head == "lm" else each.scalar(hidden)
            assert out.dtype == torch.float32
            assert not torch.equal(out, out.bfloat16().float())


def test_a_frozen_weight_is_converted_once_and_again_when_it_changes() -> None:
    hidden, weight = torch.ones(1, 2).bfloat16(), torch.ones(3, 2).bfloat16()
    with mock.patch.object(upcast.functional, "linear", side_effect=torch.nn.functional.linear) as linear:
        before = [linear_in_float32(hidden, weight) for _ in range(2)]
        weight.copy_(2 * weight)
        assert torch.equal(linear_in_float32(hidden, weight), 2 * before[1])
        linear_in_float32(hidden, weight.requires_grad_())
    first, second, changed, trained = (call.args[1] for call in linear.call_args_list)
    assert first is second
    assert len({id(copied) for copied in (first, changed, trained)}) == 3
