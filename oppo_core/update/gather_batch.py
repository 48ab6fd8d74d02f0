"""The batch of all ranks.

Each rank has run its own answers through the networks. What the loss needs of the whole batch (whitening, moments, baselines,
metrics) is little work beside that, so every rank gets all rows and computes it for itself, all of them the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save
from torch import Tensor

from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.results import Scored

if TYPE_CHECKING:
    from oppo_core.engine.state import Engine

PLAIN = ("sequence_id", "prompt_index", "age", "cohort", "finished", "ended_by_eos", "stopped", "kept_version")


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """Everybody's rows in sequence_id order; `own`: which of them are this rank's, None where all are."""

    sequences: list[Sequence]
    proximal: list[Tensor]
    scored: list[Scored]
    own: list[int] | None = None


def whole_batch(engine: Engine, trained: list[Sequence], proximal: list[Tensor], scored: list[Scored]) -> WholeBatch:
    """This rank's rows together with those of all others, which may still be at theirs."""
    if engine.ranks.world == 1:
        return WholeBatch(trained, proximal, scored)
    with engine.trace.wait("tail"):
        parcels = engine.ranks.gather(packed(trained, proximal, scored))
    rows = list(zip(trained, proximal, scored, strict=True))
    for rank, parcel in enumerate(parcels):
        if rank != engine.ranks.rank:
            rows += unpacked(parcel, engine.prompts.prompts)
    rows.sort(key=lambda row: row[0].sequence_id)
    mine = {sequence.sequence_id for sequence in trained}
    own = [number for number, row in enumerate(rows) if row[0].sequence_id in mine]
    return WholeBatch([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], own)


def packed(trained: list[Sequence], proximal: list[Tensor], scored: list[Scored]) -> bytes:
    """Rows as bytes: plain data as JSON, numbers a token as arrays."""
    heads = [
        {name: getattr(s, name) for name in PLAIN}
        | {"tokens": s.length, "values": len(row.values), "score": row.score, "parts": row.parts, "cached": row.cached}
        for s, row in zip(trained, scored, strict=True)
    ]
    parcel: bytes = save(
        {
            "heads": np.frombuffer(json.dumps(heads).encode(), dtype=np.uint8),
            "response": _joined([s.response for s in trained], np.int64),
            "token_versions": _joined([s.token_versions for s in trained], np.int64),
            "behaviour_logprobs": _joined([s.behaviour_logprobs for s in trained], np.float64),
            "proximal": _joined([row.double().cpu().numpy() for row in proximal], np.float64),
            "reference": _joined([row.reference_logprobs for row in scored], np.float64),
            "values": _joined([row.values for row in scored], np.float64),
        }
    )
    return parcel


def unpacked(parcel: bytes, prompts: list[NDArray[np.int64]]) -> list[tuple[Sequence, Tensor, Scored]]:
    """What `packed` has made, with the prompts that it names."""
    arrays = load(parcel)
    heads = json.loads(arrays["heads"].tobytes())
    cuts = {
        name: np.split(arrays[name], np.cumsum([head["values" if name == "values" else "tokens"] for head in heads])[:-1])
        for name in ("response", "token_versions", "behaviour_logprobs", "proximal", "reference", "values")
    }
    rows = []
    for number, head in enumerate(heads):
        listed = {name: cuts[name][number].tolist() for name in ("response", "token_versions", "behaviour_logprobs")}
        sequence = Sequence(prompt=prompts[head["prompt_index"]], **{name: head[name] for name in PLAIN}, **listed)
        scored = Scored(
            head["score"], cuts["reference"][number], cuts["values"][number], parts=tuple(head["parts"]),
            cached=tuple(head["cached"]),
        )  # fmt: skip
        rows.append((sequence, torch.from_numpy(cuts["proximal"][number]), scored))
    return rows


def _joined(rows: Rows[Rows[float] | NDArray[np.float64]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate([np.asarray(row, dtype=dtype) for row in rows])
