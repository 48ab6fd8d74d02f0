"""What cannot be streamed exactly is refused when it is loaded, with the reason; a wrong sum never trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.spec import ModelSpec
from oppo_core.models.huggingface_io import load_huggingface
from oppo_core.models.model_io import load_model
from tests.engine.models.architectures import CONTEXT, SIZES, config_of, write_folders

SLIDING = {"sliding_window": 6}
# (model type, what its configuration has beyond SIZES, words of the reason); refused before weights are looked for.
BY_CONFIG: dict[str, tuple[str, dict[str, Any], str]] = {
    "encoder": ("t5", {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}, "has an encoder"),
    "state-space": ("mamba", {}, "linear_attention"),
    "hybrid": ("qwen3_next", {}, "linear_attention"),
    "recurrent": ("rwkv", {}, "recurrent"),
    "chunked": ("llama4_text", {}, "chunked_attention"),
    "modalities": ("gemma3", {}, "other modalities"),
    "shared-keys": ("gemma4_text", {**SLIDING, "num_kv_shared_layers": 1, "num_hidden_layers": 6}, "share the keys and values"),
    "local": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_hidden_layers": 2}, "its local"),
    "looks-ahead": ("gemma3_text", {**SLIDING, "use_bidirectional_attention": True}, "is not causal"),
    "cross-attention": ("gpt2", {"add_cross_attention": True}, "cross-attention"),
    "no-language-model": ("distilbert", {}, "no causal language model"),
    "dynamic-rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    "quantised": ("llama", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "quantised"),
}  # fmt: skip


def written(name: str, folder: Path) -> Path:
    kind, more, _ = BY_CONFIG[name]
    sizes = {} if kind in ("t5", "gemma3", "distilbert") else SIZES
    CONFIG_MAPPING[kind](**{**sizes, **more}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", BY_CONFIG)
def test_refused_by_its_configuration(name: str, tmp_path: Path) -> None:
    folder = written(name, tmp_path / "model")
    with pytest.raises(ModelFolderError, match=BY_CONFIG[name][2]):
        load_model(ModelSpec(path="model"), "lm", [tmp_path], torch.float32, 0)
    assert folder.name == "model"


def test_custom_code_is_never_run(tmp_path: Path) -> None:
    proof = tmp_path / "it-ran"
    (tmp_path / "evil.py").write_text(f"open({str(proof)!r}, 'w')\nclass Evil: pass\n")
    described = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ModelFolderError, match="custom code"):
        load_huggingface(str(tmp_path), "lm", torch.float32)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("bert", {"is_decoder": False}, "cannot be streamed exactly: its states differ"),
        ("bloom", {"n_head": 4}, "max_position_embeddings|cannot be read in parts"),
    ],
)
def test_refused_by_the_proof(kind: str, more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Models that look right, and are not: attention to both sides, keys that know no positions."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **more})).save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=reason):
        load_huggingface(str(tmp_path), "lm", torch.float32)


def test_a_head_that_the_proof_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does to its logits what we do not know of is found out."""
    write_folders("granite", tmp_path)
    load_huggingface(str(tmp_path / "actor"), "lm", torch.float32)
    monkeypatch.setattr("oppo_core.models.supported.logit_rule", lambda config: None)
    with pytest.raises(ModelFolderError, match="its logits differ"):
        load_huggingface(str(tmp_path / "actor"), "lm", torch.float32)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    write_folders("qwen2", tmp_path)
    path = tmp_path / "actor" / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj\.weight"):
        load_huggingface(str(tmp_path / "actor"), "lm", torch.float32)


def test_a_long_rope_ends_where_its_frequencies_change(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "rope_theta": 1e4}
    config = config_of("phi3", rope_parameters=rope, original_max_position_embeddings=CONTEXT // 2, sliding_window=None)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load_huggingface(str(tmp_path), "lm", torch.float32).context == CONTEXT // 2
