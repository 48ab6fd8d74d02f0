"""The weights that a bench trains: random, made here, nothing downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oppo_bench.workload import CONTEXT, VOCAB, Size, tiny_model

PAD, EOS = 0, 2


def model_of(size: Size, folder: Path, seed: int) -> dict[str, Any]:
    """A `ModelSpec` of that size; a transformers model is written into `folder` first."""
    if size.model_type == "oppo_tiny":
        return tiny_model(size)
    path = folder / "model"
    write_transformers_model(size, path, seed)
    return {"path": str(path)}


def write_transformers_model(size: Size, folder: Path, seed: int) -> None:
    """A causal language model with random weights, as `from_pretrained` reads it, and a tokenizer of `VOCAB` words."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        size.model_type, hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads, intermediate_size=size.inner, vocab_size=size.vocab,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, size.dtype))
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """One word a token id; ids beyond `VOCAB` exist in the weights only, as padding of the table does."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": PAD, "<s>": 1, "</s>": EOS} | {f"w{number}": number for number in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names))
