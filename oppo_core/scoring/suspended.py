"""What the scorers hold of half-read sequences, as two files: a run that goes on from them computes the very same bits.

Read again in other pieces, the same tokens would give the same numbers up to rounding only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from oppo_core.models.model_io import save_weights
from oppo_core.rollout.sampling_support import laid_out, taken_apart
from oppo_core.scoring.incremental_prefill import below
from oppo_core.scoring.scored_sequence import Track

STATE, TENSORS = "scorers.json", "scorers.safetensors"
PLAIN = ("prompt_length", "finished", "stopped")
PARTS = ("reference_logprobs", "values")


class Reader(Protocol):
    """A network, or the reward's parts, with what it remembers of every sequence."""

    def suspend(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All of it, as plain data and tensors."""

    def resume(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take it back."""

    def forget(self, sequence_id: int) -> None:
        """Drop one sequence."""


Readers = Mapping[str, Reader]


def write(folder: Path, tracks: dict[int, Track], readers: Readers) -> None:
    """Write both files."""
    known, tensors = {}, {}
    for sequence_id, track in tracks.items():
        known[sequence_id] = {name: getattr(track, name) for name in PLAIN} | {"tokens": track.tokens.tolist()}
        for part in PARTS:
            if getattr(track, part):
                tensors[f"track.{sequence_id}.{part}"] = torch.cat(getattr(track, part))
    supports = laid_out({sequence_id: track.support for sequence_id, track in tracks.items()})
    tensors |= {f"support.{name}": torch.from_numpy(array) for name, array in supports.items()}
    states = {}
    for name, reader in readers.items():
        states[name], held = reader.suspend()
        tensors |= {f"{name}.{key}": tensor for key, tensor in held.items()}
    (folder / STATE).write_text(json.dumps({"tracks": known, "readers": states}))
    save_weights(tensors, folder / TENSORS)


def read(folder: Path, readers: Readers, device: torch.device) -> dict[int, Track]:
    """Give `readers` back what they held; returns the tracks."""
    state, tensors = json.loads((folder / STATE).read_text()), load_file(folder / TENSORS)
    for name, reader in readers.items():
        reader.resume(state["readers"][name], below(f"{name}.", tensors))
    tracks = {int(i): Track(**row | {"tokens": np.asarray(row["tokens"], dtype=np.int64)}) for i, row in state["tracks"].items()}
    for key, tensor in below("track.", tensors).items():
        sequence_id, part = key.split(".")
        setattr(tracks[int(sequence_id)], part, [tensor.to(device)])
    for i, support in taken_apart({name: tensor.numpy() for name, tensor in below("support.", tensors).items()}).items():
        tracks[i].support = support
    return tracks
