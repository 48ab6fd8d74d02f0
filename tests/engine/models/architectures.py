"""Folders of small, randomly weighted models of every supported architecture, and plain transformers as the oracle.

The oracle shares no code with the engine: transformers' own forward pass over whole, padded rows, with its own masks, its own
eager attention and its own heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

Tokens = NDArray[np.int64]
VOCAB, WINDOW, CONTEXT = 50, 6, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,
}  # fmt: skip
SLIDING, CAPPED = {"sliding_window": WINDOW}, {"head_dim": 10, "query_pre_attn_scalar": 10}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# name → (model type, what its configuration has beyond SIZES)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", {**SLIDING, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 10}),
    "llama": ("llama", {}),
    "mistral": ("mistral", SLIDING),
    "gpt2": ("gpt2", {}),
    "gemma": ("gemma", {"head_dim": 10}),
    "gemma2": ("gemma2", {**SLIDING, **CAPPED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**SLIDING, **CAPPED, "sliding_window_pattern": 2}),
    # Beyond the list: heads of different width, scaled logits, experts, attention sinks.
    "gemma4": (
        "gemma4_text",
        {**SLIDING, "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.3}),
    "cohere2": ("cohere2", {**SLIDING, "sliding_window_pattern": 2, "logit_scale": 0.25, "head_dim": 6}),
    "mixtral": ("mixtral", {**SLIDING, **EXPERTS}),
    "gpt_oss": ("gpt_oss", {**SLIDING, **EXPERTS, "head_dim": 8}),
    "phi3": ("phi3", SLIDING),
    # Not on the list: it hands on to its attention function nothing but what it knows.
    "stablelm": ("stablelm", {}),
}  # fmt: skip
WITHOUT_CLASSIFIER = {"gemma4", "granite", "cohere2"}
WITHOUT_BANDS = {"gpt_oss", "stablelm"}


def config_of(name: str, **changes: Any) -> Any:
    """The configuration of one of ARCHITECTURES, small."""
    kind, more = ARCHITECTURES[name]
    return CONFIG_MAPPING[kind](**{**SIZES, **more, **changes})


def write_folders(name: str, root: Path) -> Path:
    """`actor` and, where there is such a class, `reward` below `root`; every weight matters."""
    for part, kind, changes in (
        ("actor", AutoModelForCausalLM, {}),
        ("reward", AutoModelForSequenceClassification, {"num_labels": 1}),
    ):
        if part == "reward" and name in WITHOUT_CLASSIFIER:
            continue
        torch.manual_seed(len(part))
        model = kind.from_config(config_of(name, **changes))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)
        model.save_pretrained(root / part)
    return root


@contextmanager
def full_precision() -> Iterator[None]:
    """Within it transformers' eager attention keeps float64; it would round its weights to float32."""
    plain = nn.functional.softmax

    def softmax(values: Tensor, *args: Any, dtype: torch.dtype | None = None, **more: Any) -> Tensor:
        return plain(values, *args, dtype=None if values.dtype == torch.float64 else dtype, **more)

    with mock.patch.object(nn.functional, "softmax", softmax):
        yield


class Plain:
    """One forward pass of plain transformers over padded rows; `left` pads before the rows, otherwise behind them."""

    def __init__(self, folder: Path, kind: Any, dtype: torch.dtype) -> None:
        given = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
        self.model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **given).eval()

    @torch.no_grad()
    def __call__(self, rows: list[Tokens], left: bool, what: str) -> list[Tensor]:
        """`what` ("logits", "last_hidden_state") at the tokens of each row, [T, …]."""
        width = max(len(row) for row in rows)
        ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
        places = [slice(width - len(row), width) if left else slice(0, len(row)) for row in rows]
        for number, (row, place) in enumerate(zip(rows, places, strict=True)):
            ids[number, place], mask[number, place] = torch.from_numpy(row), 1
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        with full_precision():
            told = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)[what]
        return [part[place] for part, place in zip(told, places, strict=True)]

    @torch.no_grad()
    def score(self, row: Tokens) -> float:
        """A classifier's own score of one row."""
        with full_precision():
            return float(self.model(input_ids=torch.from_numpy(row)[None], use_cache=False).logits[0, 0])


def plain_actor(folder: Path, dtype: torch.dtype) -> Plain:
    """The language model of `write_folders`."""
    return Plain(folder / "actor", AutoModelForCausalLM, dtype)


def plain_backbone(folder: Path, dtype: torch.dtype) -> Plain:
    """The language model without its head."""
    return Plain(folder / "actor", AutoModel, dtype)


def plain_reward(folder: Path, dtype: torch.dtype) -> Plain:
    """The classifier of `write_folders`."""
    return Plain(folder / "reward", AutoModelForSequenceClassification, dtype)
