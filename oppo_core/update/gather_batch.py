"""Gathers the batch of all ranks (all-gather).

Each rank runs its own answers through the networks. Whole-batch computations (whitening, moments, baselines, metrics) are cheap,
so every rank receives all rows and computes them redundantly, with identical results.
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

from oppo_core.ppo.scored import Scored
from oppo_core.rollout.sequence import Sequence

if TYPE_CHECKING:
    from oppo_core.engine.state import Engine

JSON_FIELDS = ("sequence_id", "prompt_index", "age", "cohort", "finished", "ended_by_eos", "stopped", "kept_version")


@dataclass(frozen=True, slots=True)
class GatheredBatch:
    """Rows of all ranks in sequence_id order; `own`: indices of this rank's rows, None if all are."""

    sequences: list[Sequence]
    proximal: list[Tensor]
    scored: list[Scored]
    own: list[int] | None = None


def gather_batch(engine: Engine, trained: list[Sequence], proximal: list[Tensor], scored: list[Scored]) -> GatheredBatch:
    """Rows of all ranks; blocks until every rank has sent its own."""
    if engine.ranks.world == 1:
        return GatheredBatch(trained, proximal, scored)
    with engine.trace.wait("tail"):
        payloads = engine.ranks.all_gather(serialize_rows(trained, proximal, scored))
    rows = list(zip(trained, proximal, scored, strict=True))
    for rank, payload in enumerate(payloads):
        if rank != engine.ranks.rank:
            rows += deserialize_rows(payload, engine.prompts.prompts)
    rows.sort(key=lambda row: row[0].sequence_id)
    mine = {sequence.sequence_id for sequence in trained}
    own = [number for number, row in enumerate(rows) if row[0].sequence_id in mine]
    return GatheredBatch([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], own)


def serialize_rows(trained: list[Sequence], proximal: list[Tensor], scored: list[Scored]) -> bytes:
    """Serialize rows: scalar fields as JSON, per-token numbers as arrays."""
    headers = [
        {name: getattr(s, name) for name in JSON_FIELDS}
        | {"tokens": s.length, "values": len(row.values), "score": row.score, "parts": row.parts, "cached": row.cached}
        for s, row in zip(trained, scored, strict=True)
    ]
    payload: bytes = save(
        {
            "headers": np.frombuffer(json.dumps(headers).encode(), dtype=np.uint8),
            "response": _concatenate([s.response for s in trained], np.int64),
            "token_versions": _concatenate([s.token_versions for s in trained], np.int64),
            "behaviour_logprobs": _concatenate([s.behaviour_logprobs for s in trained], np.float64),
            "proximal": _concatenate([row.double().cpu().numpy() for row in proximal], np.float64),
            "reference": _concatenate([row.reference_logprobs for row in scored], np.float64),
            "values": _concatenate([row.values for row in scored], np.float64),
        }
    )
    return payload


def deserialize_rows(payload: bytes, prompts: list[NDArray[np.int64]]) -> list[tuple[Sequence, Tensor, Scored]]:
    """The inverse of `serialize_rows`; `prompts` is the prompt dataset."""
    arrays = load(payload)
    headers = json.loads(arrays["headers"].tobytes())
    cuts = {
        name: np.split(arrays[name], np.cumsum([head["values" if name == "values" else "tokens"] for head in headers])[:-1])
        for name in ("response", "token_versions", "behaviour_logprobs", "proximal", "reference", "values")
    }
    rows = []
    for number, head in enumerate(headers):
        listed = {name: cuts[name][number].tolist() for name in ("response", "token_versions", "behaviour_logprobs")}
        sequence = Sequence(prompt=prompts[head["prompt_index"]], **{name: head[name] for name in JSON_FIELDS}, **listed)
        scored = Scored(
            head["score"], cuts["reference"][number], cuts["values"][number], parts=tuple(head["parts"]),
            cached=tuple(head["cached"]),
        )  # fmt: skip
        rows.append((sequence, torch.from_numpy(cuts["proximal"][number]), scored))
    return rows


def _concatenate(rows: Rows[Rows[float] | NDArray[np.float64]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate([np.asarray(row, dtype=dtype) for row in rows])
