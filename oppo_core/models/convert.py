"""Converts GGUF and PyTorch weights, which the engine never loads, into a model folder with safetensors."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from pickle import UnpicklingError  # what `torch.load` raises for anything but weights
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from oppo_contract.model_folder import ModelFolderError, read_config
from oppo_core.models.huggingface_io import without_deepspeed_import

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
READABLE = 0o644  # safetensors writes 0600, which a worker's own account cannot read


def convert_model(source: Path, out: Path, dtype: str = "float32") -> int:
    """Write the model of `source` with its tokenizer into the new folder `out`; returns the number of weights.

    Quantized weights are dequantized. PyTorch files are read by `torch.load` with `weights_only`, which runs no code of theirs.

    Args:
        source: a GGUF file; or a folder with one, or with config.json and pytorch_model*.bin.
        dtype: a key of `DTYPES`.

    Raises:
        ModelFolderError: `source` has no such weights or not all of them, `out` exists already, or transformers cannot read the
            model.
    """
    if out.exists():
        raise ModelFolderError(f"{out} exists already; name a folder that does not")
    folder, gguf = _find_weights(source)
    from_gguf: dict[str, Any] = {"gguf_file": gguf.name} if gguf else {}
    given: dict[str, Any] = from_gguf or {"use_safetensors": False}
    kind = AutoModelForSequenceClassification if gguf is None and _is_classifier(folder) else AutoModelForCausalLM
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **from_gguf)
        model, loaded = kind.from_pretrained(
            folder, dtype=DTYPES[dtype], trust_remote_code=False, output_loading_info=True, **given
        )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, UnpicklingError) as error:
        raise ModelFolderError(f"{gguf or folder} cannot be converted: {error}") from error
    if lacking := sorted(map(str, [*loaded["missing_keys"], *loaded["mismatched_keys"]])):  # initialised at random
        raise ModelFolderError(f"{gguf or folder} cannot be converted: it lacks the weights {', '.join(lacking[:5])}")
    return _write(_unquantized(model), tokenizer, out)


def _is_classifier(folder: Path) -> bool:
    architectures = cast(list[str], read_config(folder).get("architectures") or [])
    return any("SequenceClassification" in name for name in architectures)


def _find_weights(source: Path) -> tuple[Path, Path | None]:
    """The model's folder, and its GGUF file if that is what it has."""
    if source.is_file():
        if source.suffix != ".gguf":
            raise ModelFolderError(f"{source} is not a .gguf file; name one, or the folder of a model")
        return source.parent, source
    if not source.is_dir():
        raise ModelFolderError(f"{source} does not exist")
    files = sorted(source.glob("*.gguf"))
    if len(files) > 1:
        raise ModelFolderError(f"{source} has several .gguf files: {', '.join(file.name for file in files)}; name one of them")
    if not files and not list(source.glob("pytorch_model*.bin")):
        what = "safetensors already and needs no conversion" if list(source.glob("*.safetensors")) else "no weights"
        raise ModelFolderError(f"{source} has {what}; GGUF files and pytorch_model*.bin can be converted")
    return source, files[0] if files else None


def _unquantized(model: Any) -> Any:
    """The model, without the mark of a dequantized one: transformers refuses to save that."""
    if not hasattr(model.config, "quantization_config"):
        return model
    weights, generation = model.state_dict(), model.generation_config
    del model.config.quantization_config
    with torch.device("meta"):
        plain = type(model)(model.config)
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()
    plain.generation_config = generation
    return plain


def _write(model: Any, tokenizer: Any, out: Path) -> int:
    """Save into a folder beside `out` and rename it, so that an interrupted conversion leaves no half model."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        fresh = Path(scratch) / "model"
        with without_deepspeed_import():
            model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        for file in fresh.iterdir():
            file.chmod(READABLE)
        os.rename(fresh, out)
    return int(model.num_parameters())
