"""Models with random weights; nothing is downloaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from oppo_bench.engine.workload import ADAPTER_RANK, CONTEXT, VOCAB, Size
from oppo_contract.model_folder import ModelFolderError

Head = Literal["lm", "scalar"]

PAD, EOS = 0, 2
MOST_ROUND_TRIPS = 8


def build_models(size: Size, folder: Path, seed: int) -> dict[str, Any]:
    """The `models` section of a spec with four roles of that size; transformers models are written into `folder` first."""
    if size.model_type == "oppo_tiny":
        shape = {"hidden": size.hidden, "layers": size.layers, "heads": size.heads, "context": CONTEXT, "vocab": size.vocab}
        return roles({"tiny": shape}, {"tiny": shape})
    shape = {
        "hidden_size": size.hidden, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads, "intermediate_size": size.inner, "vocab_size": size.vocab,
    }  # fmt: skip
    model = {"path": str(write_model(size.model_type, shape, "lm", size.dtype, folder / "model", seed))}
    return roles(model, model)


def published_models(model: Path, folder: Path, seed: int) -> dict[str, Any]:
    """The same for a published model, trained by adapters; the reward model has its weights and a random head.

    Raises ModelFolderError if transformers cannot read the folder.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # the head is not in the folder
    reward = folder / "reward"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            scored = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ModelFolderError(f"{model} cannot be read as a model: {error}") from None
    end = scored.config.eos_token_id
    scored.config.pad_token_id = end[0] if isinstance(end, list) else end
    scored.save_pretrained(reward)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (model / name).exists():
            shutil.copy(model / name, reward)
    return roles({"path": str(model)}, {"path": str(reward)}) | {"lora": {"rank": ADAPTER_RANK}}


def round_trip_prompts(prompts: Path, model: Path) -> None:
    """Replace the prompts of the file by ids that are the same when they are decoded and encoded again by the model's tokenizer.

    Trainers that take prompts as text then read the same ids.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    stable = []
    for line in prompts.read_text().splitlines():
        ids, before = json.loads(line)["prompt"], None
        for _ in range(MOST_ROUND_TRIPS):
            ids, before = tokenizer(tokenizer.decode(ids, skip_special_tokens=True))["input_ids"], ids
            if ids == before:
                break
        stable.append(ids)
    prompts.write_text("".join(json.dumps({"prompt": ids}) + "\n" for ids in stable))


def build_peer_models(size: Size, folder: Path, seed: int) -> dict[str, Any]:
    """The same as model folders that TRL reads: GPT-2, whose blocks equal those of our own architecture."""
    shape = {"n_embd": size.hidden, "n_layer": size.layers, "n_head": size.heads, "n_inner": size.inner, "vocab_size": size.vocab}
    actor = write_model("gpt2", shape, "lm", size.dtype, folder / "actor", seed)
    reward = write_model("gpt2", shape, "scalar", size.dtype, folder / "reward", seed + 1)
    return roles({"path": str(actor)}, {"path": str(reward)})


def roles(actor: dict[str, Any], reward: dict[str, Any]) -> dict[str, Any]:
    """A `models` section: the reference is the actor at step 0, the critic starts from the reward model."""
    return {"actor": actor, "reward": {"model": reward}, "critic": "reward"}


def write_model(model_type: str, shape: dict[str, Any], head: Head, dtype: str, folder: Path, seed: int) -> Path:
    """Write a model with random weights in the format of `from_pretrained`, with a word-level tokenizer; returns `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(
        model_type, max_position_embeddings=CONTEXT, tie_word_embeddings=True, num_labels=1,
        pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS, **shape,
    )  # fmt: skip
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One word per token id; ids beyond `VOCAB` exist in the weights only."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": PAD, "<s>": 1, "</s>": EOS} | {f"w{number}": number for number in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names))
