"""The support of a sampled token: the tokens it was chosen among, recorded at sampling and applied again in training.

Top-k, top-p and min-p renormalise what they leave. A log-prob means the same to sampler and trainer only when both leave the
same tokens, and the trainer's weights would leave others: so the sampler's choice is kept (docs/algorithm.md, "Sampling
filters").
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
Arrays = dict[str, NDArray[Any]]


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


def plain(support: Support) -> list[list[Any]]:
    """As (kind, numbers) a token, for JSON; `from_plain` takes it back."""
    return [[str(left.dtype), left.tolist()] for left in support]


def from_plain(rows: list[list[Any]]) -> Support:
    """See `plain`."""
    return [np.asarray(numbers, dtype=kind) for kind, numbers in rows]


def laid_out(supports: dict[int, Support]) -> Arrays:
    """Supports by sequence_id as few arrays, for a file; sequences without any are left out.

    A sequence's arrays are laid end to end by kind; `sizes` says how long each is, bits as negative numbers.
    """
    arrays: Arrays = {}
    for sequence_id, support in supports.items():
        if support:
            sizes = [len(left) if left.dtype == np.int32 else -len(left) for left in support]
            arrays[f"{sequence_id}.sizes"] = np.asarray(sizes, dtype=np.int64)
            for kind in KINDS:
                parts = [left for left in support if left.dtype == kind]
                arrays[f"{sequence_id}.{np.dtype(kind)}"] = np.concatenate([np.empty(0, dtype=kind), *parts])
    return arrays


def taken_apart(arrays: Arrays) -> dict[int, Support]:
    """What `laid_out` was given."""
    supports: dict[int, Support] = {}
    for sequence_id in [int(name.removesuffix(".sizes")) for name in arrays if name.endswith(".sizes")]:
        parts = {kind: arrays[f"{sequence_id}.{np.dtype(kind)}"] for kind in KINDS}
        support = supports[sequence_id] = []
        for size in arrays[f"{sequence_id}.sizes"].tolist():
            kind = np.int32 if size > 0 else np.uint8
            left, parts[kind] = parts[kind][: abs(size)], parts[kind][abs(size) :]
            support.append(left)
    return supports


def save_supports(sequences: list[Sequence], folder: Path) -> None:
    """Write what `load_supports` takes back; nothing when nothing was filtered."""
    arrays = laid_out({s.sequence_id: s.support for s in sequences})
    if arrays:
        save_file(arrays, folder / FILE)


def load_supports(sequences: list[Sequence], folders: Iterable[Path]) -> None:
    """Give `sequences` the supports that were written for them into some of the folders."""
    supports: dict[int, Support] = {}
    for folder in folders:
        if (folder / FILE).exists():
            supports |= taken_apart(load_file(folder / FILE))
    for sequence in sequences:
        sequence.support = supports.get(sequence.sequence_id, [])
