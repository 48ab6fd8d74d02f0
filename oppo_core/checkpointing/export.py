"""Exports the trained actor of a checkpoint as a folder of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from oppo_contract.model_folder import ModelFolderError, find
from oppo_contract.spec import RunSpec, load_stored_spec
from oppo_core.checkpointing.atomic_dir import CheckpointError
from oppo_core.checkpointing.model_card import CARD, model_card
from oppo_core.checkpointing.rank_states import read_state
from oppo_core.checkpointing.save_restore import check_intact
from oppo_core.models.load_roles import DTYPES
from oppo_core.models.model_io import OLD_ADAPTERS, load_model, restore_weights, save_merged
from oppo_core.ppo.actor import WEIGHTS
from oppo_core.rollout.tokenizer import load_codec


def export_actor(checkpoint: Path, out: Path, merge: bool = False, roots: list[Path] | None = None) -> list[str]:
    """Write the actor of `checkpoint`, with its tokenizer and a model card, to the new folder `out`; returns the file names.

    A Hugging Face actor can be loaded by `from_pretrained`, LoRA adapters by `peft`.

    Args:
        merge: whether to merge LoRA adapters into the weights, in float32: in bfloat16 small changes of a weight are lost.
        roots: where the spec's models are; for `merge`, and for the base model's licence.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or `out` exists already.
        ModelFolderError: the model of the adapters is not in `roots`, or was changed.
    """
    check_intact(checkpoint)
    if out.exists():
        raise CheckpointError(f"{out} exists already; name a folder that does not")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        fresh, state = Path(scratch) / "actor", read_state(checkpoint)
        spec = load_stored_spec(state["spec"])
        if merge and spec.models.lora is not None:
            _export_merged(checkpoint, spec, fresh, roots or [])
        else:
            shutil.copytree(checkpoint / WEIGHTS, fresh, ignore=shutil.ignore_patterns(OLD_ADAPTERS))
        (fresh / CARD).write_text(model_card(spec, state, fresh, _base_folder(spec, roots or [])), encoding="utf-8")
        os.rename(fresh, out)
    return sorted(path.name for path in out.iterdir())


def _base_folder(spec: RunSpec, roots: list[Path]) -> Path | None:
    """The folder of the actor's initial weights; None if it is not here."""
    try:
        return find(spec.models.actor.path, roots) if spec.models.actor.path is not None else None
    except ModelFolderError:  # only needed for its licence
        return None


def _export_merged(checkpoint: Path, spec: RunSpec, out: Path, roots: list[Path]) -> None:
    """The frozen weights are loaded in the run's precision, in which the adapters were trained beside them."""
    actor = spec.models.actor
    network = load_model(actor, "lm", roots, DTYPES[spec.resources.dtype], spec.seed, spec.models.lora)
    restore_weights(network, checkpoint / WEIGHTS)
    source, codec = find(actor.path, roots) if actor.path is not None else None, load_codec(actor, roots)
    save_merged(network, out, source, codec.eos, codec.pad)
