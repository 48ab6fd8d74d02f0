"""Shapes read from config.json alone equal those that transformers and our own network have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.spec import ModelSpec, TinyArchitecture
from oppo_core.models.tensor_files import save_weights
from oppo_core.models.tiny_transformer import TinyTransformer
from oppo_estimate.shapes import Head, Shape, read_shape, tiny_shape

SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 128}


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_the_weights_of_our_own_architecture_are_counted_without_building_it(head: Head) -> None:
    architecture = TinyArchitecture(layers=3, hidden=32, heads=4, vocab=77, context=50)
    network = TinyTransformer(architecture, head)
    shape = tiny_shape(architecture, head)
    assert shape.weights == sum(weight.numel() for weight in network.parameters())
    assert shape.cached == network.cache_shape.numbers


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, num_key_value_heads=2),
        Qwen2Config(**SIZES, num_key_value_heads=1),
        Gemma2Config(**SIZES, head_dim=24),
        GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=99, n_positions=128),
    ],
    ids=lambda config: config.model_type,
)
def test_a_hugging_face_config_gives_the_sizes_that_transformers_uses(config: PretrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    save_weights({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "model.safetensors")
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = Shape(22, 3, 64, 99, 128, 2 * 3 * kv_heads * head_width, config.tie_word_embeddings)
    assert read_shape(ModelSpec(path=str(tmp_path)), "lm", []) == shape


def test_a_config_with_other_names_for_its_sizes_has_no_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "other", "depth": 3}')
    assert read_shape(ModelSpec(path=str(tmp_path)), "lm", []) is None


def test_a_model_on_the_hub_has_no_shape_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSpec(path="owner/name")
    with pytest.raises(ModelFolderError, match="does not exist here"):
        read_shape(model, "lm", [])
    monkeypatch.setenv("OPPO_ALLOW_HUB", "1")
    assert read_shape(model, "lm", []) is None
