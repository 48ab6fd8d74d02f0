"""Shapes read from config.json alone equal those that transformers and our own network have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
)

from oppo_contract.config_weights import NORMS
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
    gpt2 = config.model_type == "gpt2"
    shape = Shape(
        22, 3, 64, 99, 128, 2 * 3 * kv_heads * head_width, config.tie_word_embeddings, config.num_attention_heads * head_width,
        256 if gpt2 else config.intermediate_size, gated=not gpt2,
    )  # fmt: skip
    assert read_shape(ModelSpec(path=str(tmp_path)), "lm", []) == shape


ATTENTION_BIAS, FEED_FORWARD_BIAS = {"attention_bias": True}, {"mlp_bias": True}
# Model type → settings besides SIZES, each of which changes the number of weights.
COUNTED: dict[str, list[dict[str, Any]]] = {
    "gemma": [{"head_dim": 24}, {"head_dim": 24, **ATTENTION_BIAS}],
    "gemma2": [{"head_dim": 24}],
    "gemma3_text": [{"head_dim": 24}, {"head_dim": 24, "tie_word_embeddings": False}],
    "granite": [{}, ATTENTION_BIAS, FEED_FORWARD_BIAS],
    "llama": [{}, ATTENTION_BIAS, FEED_FORWARD_BIAS, {"head_dim": 24}, {"tie_word_embeddings": True}],
    "mistral": [{}, {"head_dim": 24}],
    "phi3": [{"pad_token_id": 0}],
    "qwen2": [{}, {"tie_word_embeddings": True}],
    "qwen3": [{"head_dim": 24}, ATTENTION_BIAS],
    "smollm3": [{"pad_token_id": 0}, {"pad_token_id": 0, "tie_word_embeddings": False}],
}


@pytest.mark.parametrize("kind", COUNTED)
def test_weights_that_follow_from_the_config_are_those_that_transformers_builds(kind: str, tmp_path: Path) -> None:
    """Without safetensors; transformers builds the models on the meta device."""
    assert COUNTED.keys() == NORMS.keys()
    heads: tuple[tuple[Any, Head], ...] = ((AutoModelForCausalLM, "lm"), (AutoModelForSequenceClassification, "scalar"))
    for changes in COUNTED[kind]:
        config = CONFIG_MAPPING[kind](**{**SIZES, "num_key_value_heads": 2, "intermediate_size": 160, "num_labels": 1, **changes})
        config.save_pretrained(tmp_path)
        for model, head in heads[: 1 if kind == "granite" else 2]:  # transformers has no classifier of Granite
            with torch.device("meta"):
                weights = sum(weight.numel() for weight in model.from_config(config).parameters())
            shape = read_shape(ModelSpec(path=str(tmp_path)), head, [])
            assert shape is not None
            assert (shape.weights, shape.tied) == (weights, config.tie_word_embeddings), (changes, head)


def test_weights_of_another_architecture_do_not_follow_from_its_config(tmp_path: Path) -> None:
    GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=99, n_positions=128).save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=r"no safetensors.*gpt2 is not one whose weights are counted from config\.json"):
        read_shape(ModelSpec(path=str(tmp_path)), "lm", [])


def test_a_config_with_other_names_for_its_sizes_has_no_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "other", "depth": 3}')
    assert read_shape(ModelSpec(path=str(tmp_path)), "lm", []) is None


def test_a_model_on_the_hub_has_no_shape_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSpec(path="owner/name")
    with pytest.raises(ModelFolderError, match="does not exist here"):
        read_shape(model, "lm", [])
    monkeypatch.setenv("OPPO_ALLOW_HUB", "1")
    assert read_shape(model, "lm", []) is None
