"""The fused activation is the one that the model's configuration names, and stays so named."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers.activations import NewGELUActivation

from oppo_contract.spec import ModelSpec
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
