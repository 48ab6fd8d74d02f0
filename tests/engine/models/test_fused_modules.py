"""Fused modules compute what transformers' own do, and the written configuration stays the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from oppo_contract.spec import ModelSpec
from oppo_core.models.fused_modules import fuse_modules
from oppo_core.models.huggingface import HuggingFaceNetwork
from oppo_core.models.huggingface_io import export_huggingface
from oppo_core.models.model_io import load_model
from tests.engine.models.architectures import plain_actor, write_folders


def test_a_formula_becomes_one_kernel(tmp_path: Path) -> None:
    """GPT-2's states and gradients are transformers' own, and so is the folder that is written."""
    write_folders("gpt2", tmp_path)
    network = load_model(ModelSpec(path="actor"), "lm", [tmp_path], torch.float64, 0)
    assert isinstance(network, HuggingFaceNetwork)
    plain = plain_actor(tmp_path, torch.float64).model
    assert any(isinstance(module, NewGELUActivation) for module in plain.modules())
    assert not any(isinstance(module, NewGELUActivation) for module in network.modules())
    tokens = torch.arange(3, 15)[None]
    ours, theirs = network.logits(network.hidden(tokens, torch.arange(12)[None])), plain(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    for logits in (ours, theirs):
        logits.logsumexp(-1).sum().backward()
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(network.model.get_parameter(name).grad, weight.grad, rtol=1e-9, atol=1e-10)
    export_huggingface(network, tmp_path / "out", network.model.state_dict())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["activation_function"] == "gelu_new"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rms_norm_is_torchs(dtype: torch.dtype, tolerance: float) -> None:
    """Results and gradients; the weight stays the same parameter under the same name."""
    norm = Qwen3RMSNorm(24, 1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    model = nn.ModuleDict({"norm": norm})
    fuse_modules(model)
    assert isinstance(model["norm"], nn.RMSNorm)
    assert model["norm"].weight is norm.weight
    states = torch.randn(5, 24, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    found = []
    for module in (model["norm"], norm):
        module(states).float().square().sum().backward()
        found.append((module(states), states.grad, norm.weight.grad))
        states.grad = norm.weight.grad = None
    torch.testing.assert_close(found[0], found[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("norm", [Gemma2RMSNorm(8), Qwen3RMSNorm(8).double()], ids=["another formula", "float64"])
def test_other_norms_stay(norm: nn.Module) -> None:
    model = nn.ModuleDict({"norm": norm})
    fuse_modules(model)
    assert model["norm"] is norm
