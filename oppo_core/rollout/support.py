"""The support of a sampled token: the tokens it was chosen among, recorded at sampling and applied again in training.

Top-k, top-p and min-p renormalise what they leave. A log-prob means the same to sampler and trainer only when both leave the
same tokens, and the trainer's weights would leave others: so the sampler's choice is kept (docs/algorithm.md, "Sampling
filters").
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch import Tensor

from oppo_core.rollout.sequence import Sequence, Support

# Sorted ids (int32) cost 4 bytes a token that is left, bits (uint8) an eighth of a byte a token of the vocabulary.
IDS_PAY_UP_TO = 1 / 32
KINDS = (np.int32, np.uint8)
FILE = "pool-support.safetensors"


def recorded(allowed_NV: Tensor) -> Support:
    """What [N, V] booleans allow, an array a row: the sorted ids (int32), or one bit a token (uint8) where that is shorter."""
    allowed = allowed_NV.cpu().numpy()
    rows, ids = np.nonzero(allowed)
    ends = np.cumsum(np.bincount(rows, minlength=len(allowed)))
    few = np.split(ids.astype(np.int32), ends[:-1])
    most = allowed.shape[1] * IDS_PAY_UP_TO
    return [left.copy() if len(left) <= most else np.packbits(row) for left, row in zip(few, allowed, strict=True)]


def restricted(logits_MV: Tensor, support: Support) -> Tensor:
    """`logits_MV` with all that row m's support leaves out at the lowest finite number; as they are when `support` is empty.

    Finite, so that 0 · log 0 is 0 in an entropy and in its gradient.
    """
    if not support:
        return logits_MV
    allowed_MV = torch.from_numpy(unpacked(support, logits_MV.shape[-1])).to(logits_MV.device)
    return logits_MV.masked_fill(~allowed_MV, torch.finfo(logits_MV.dtype).min)


def unpacked(support: Support, vocab: int) -> NDArray[np.bool_]:
    """Booleans [M, vocab] of what `recorded` gave. Ids beyond that vocabulary would be an error, missing bits are False."""
    allowed = np.zeros((len(support), vocab), dtype=np.bool_)
    listed = [row for row, left in enumerate(support) if left.dtype == np.int32]
    if listed:
        rows = np.repeat(listed, [len(support[row]) for row in listed])
        allowed[rows, np.concatenate([support[row] for row in listed])] = True
    for row, left in enumerate(support):
        if left.dtype == np.uint8:
            allowed[row] = np.unpackbits(left.view(np.uint8), count=vocab)
    return allowed


def joined(supports: Iterable[Support]) -> Support:
    """The supports of several sequences, one after the other, as their response tokens stand in a batch."""
    return [left for support in supports for left in support]


def save_supports(sequences: list[Sequence], folder: Path) -> None:
    """Write what `load_supports` takes back; nothing when nothing was filtered.

    A sequence's arrays are laid end to end by kind; `sizes` says how long each is, bits as negative numbers.
    """
    arrays: dict[str, NDArray[np.int32] | NDArray[np.int64] | NDArray[np.uint8]] = {}
    for sequence in sequences:
        if sequence.support:
            sizes = [len(left) if left.dtype == np.int32 else -len(left) for left in sequence.support]
            arrays[f"{sequence.sequence_id}.sizes"] = np.asarray(sizes, dtype=np.int64)
            for kind in KINDS:
                parts = [left for left in sequence.support if left.dtype == kind]
                arrays[f"{sequence.sequence_id}.{np.dtype(kind)}"] = np.concatenate([np.empty(0, dtype=kind), *parts])
    if arrays:
        save_file(arrays, folder / FILE)


def load_supports(sequences: list[Sequence], folder: Path) -> None:
    """Give `sequences` the supports that were written for them."""
    arrays = load_file(folder / FILE) if (folder / FILE).exists() else {}
    for sequence in sequences:
        sizes = arrays.get(f"{sequence.sequence_id}.sizes")
        if sizes is not None:
            parts = {kind: arrays[f"{sequence.sequence_id}.{np.dtype(kind)}"] for kind in KINDS}
            sequence.support = []
            for size in sizes.tolist():
                kind = np.int32 if size > 0 else np.uint8
                left, parts[kind] = parts[kind][: abs(size)], parts[kind][abs(size) :]
                sequence.support.append(left)
