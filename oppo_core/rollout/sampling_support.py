"""The support of a sampled token: the tokens that sampling filters kept, recorded at sampling and applied again in training.

Top-k, top-p and min-p renormalise over the tokens they keep. Log-probs of sampler and trainer agree only over the same tokens,
and the trainer's weights would keep others, so the sampler's set is recorded (docs/algorithm.md, "Sampling filters").
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

# Sorted ids (int32) take 4 bytes per kept token, a bit mask (uint8) 1/8 byte per vocabulary token.
MAX_ID_SHARE = 1 / 32
KINDS = (np.int32, np.uint8)
FILE = "pool-support.safetensors"
Arrays = dict[str, NDArray[Any]]


def encode_support(allowed_NV: Tensor) -> Support:
    """Encode a mask [N, V] as one array per row: sorted ids (int32), or a bit mask (uint8) where that is shorter."""
    allowed = allowed_NV.cpu().numpy()
    rows, ids = np.nonzero(allowed)
    ends = np.cumsum(np.bincount(rows, minlength=len(allowed)))
    few = np.split(ids.astype(np.int32), ends[:-1])
    most = allowed.shape[1] * MAX_ID_SHARE
    return [listed.copy() if len(listed) <= most else np.packbits(row) for listed, row in zip(few, allowed, strict=True)]


def mask_unsupported(logits_MV: Tensor, support: Support) -> Tensor:
    """Set logits outside each row's support to the lowest finite number; unchanged when `support` is empty.

    Finite rather than −∞, so that 0 · log 0 is 0 in the entropy and its gradient.
    """
    if not support:
        return logits_MV
    allowed_MV = torch.from_numpy(decode_support(support, logits_MV.shape[-1])).to(logits_MV.device)
    return logits_MV.masked_fill(~allowed_MV, torch.finfo(logits_MV.dtype).min)


def decode_support(support: Support, vocab: int) -> NDArray[np.bool_]:
    """Boolean mask [M, vocab] from `encode_support`. Missing bits are False; raises IndexError for ids beyond `vocab`."""
    allowed = np.zeros((len(support), vocab), dtype=np.bool_)
    listed = [row for row, left in enumerate(support) if left.dtype == np.int32]
    if listed:
        rows = np.repeat(listed, [len(support[row]) for row in listed])
        allowed[rows, np.concatenate([support[row] for row in listed])] = True
    for row, left in enumerate(support):
        if left.dtype == np.uint8:
            allowed[row] = np.unpackbits(left.view(np.uint8), count=vocab)
    return allowed


def concat_supports(supports: Iterable[Support]) -> Support:
    """Concatenate the supports of several sequences, in the order of their response tokens in a batch."""
    return [left for support in supports for left in support]


def support_to_json(support: Support) -> list[list[Any]]:
    """(dtype, numbers) per token, for JSON; the inverse of `support_from_json`."""
    return [[str(left.dtype), left.tolist()] for left in support]


def support_from_json(rows: list[list[Any]]) -> Support:
    """The inverse of `support_to_json`."""
    return [np.asarray(numbers, dtype=kind) for kind, numbers in rows]


def flatten_supports(supports: dict[int, Support]) -> Arrays:
    """Supports by sequence_id as few arrays, for a safetensors file; empty ones are omitted.

    A sequence's arrays are concatenated by dtype; `sizes` holds their lengths, negative for bit masks.
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


def unflatten_supports(arrays: Arrays) -> dict[int, Support]:
    """The inverse of `flatten_supports`."""
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
    """Write the supports for `load_supports`; writes no file when there are none."""
    arrays = flatten_supports({s.sequence_id: s.support for s in sequences})
    if arrays:
        save_file(arrays, folder / FILE)


def load_supports(sequences: list[Sequence], folders: Iterable[Path]) -> None:
    """Set the supports of `sequences` from the files in `folders`."""
    supports: dict[int, Support] = {}
    for folder in folders:
        if (folder / FILE).exists():
            supports |= unflatten_supports(load_file(folder / FILE))
    for sequence in sequences:
        sequence.support = supports.get(sequence.sequence_id, [])
