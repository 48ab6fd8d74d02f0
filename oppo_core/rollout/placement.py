"""Places sequences on the ranks that decode them and rows on those that train them, and moves their tokens between ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from oppo_core.distributed.process_group import Ranks
from oppo_core.rollout.sampling_support import flatten_supports, unflatten_supports
from oppo_core.rollout.sequence import Sequence

HEADERS = "headers"
SCALARS = ("sequence_id", "kept_version")
PER_TOKEN: dict[str, type[np.generic]] = {
    "response": np.int64, "token_versions": np.int64, "behaviour_logprobs": np.float64, "stale_logprobs": np.float64,
}  # fmt: skip


def assign_ranks(sequences: list[Sequence], world: int, slots: int, max_new: int) -> list[int]:
    """The rank for each unfinished sequence; a function of the arguments only, so that all ranks agree.

    A sequence stays where its KV caches are. New ones go to the rank with the fewest outstanding tokens (those that its
    sequences may still decode), as do the youngest ones of a rank with more than `slots`.

    Args:
        sequences: the oldest first.
        slots: most sequences of a rank; `world` × `slots` are enough for all.
        max_new: maximum length of a response, tokens.
    """
    assigned: dict[int, int] = {}
    outstanding, count = [0] * world, [0] * world

    def assign(place: int, rank: int) -> None:
        assigned[place] = rank
        outstanding[rank] += max_new - sequences[place].length
        count[rank] += 1

    for place, sequence in enumerate(sequences):
        if sequence.rank is not None and count[sequence.rank] < slots:
            assign(place, sequence.rank)
    unassigned = [place for place in range(len(sequences)) if place not in assigned]
    for place in sorted(unassigned, key=lambda place: (sequences[place].length, sequences[place].sequence_id)):
        free = (rank for rank in range(world) if count[rank] < slots)
        assign(place, min(free, key=lambda rank: (outstanding[rank], rank)))
    return [assigned[place] for place in range(len(sequences))]


def balance_rows(rows: list[Sequence], world: int) -> list[int]:
    """The rank that trains each row of a batch, balanced by tokens; a function of the arguments only.

    The longest rows first: each stays on its rank while that has at most an equal share of the tokens (or the longest row), else
    it goes to the rank with the fewest tokens.
    """
    tokens = [len(row.prompt) + row.length for row in rows]
    limit, load = max(sum(tokens) / world, *tokens), [0] * world
    trainers: dict[int, int] = {}
    for place in sorted(range(len(rows)), key=lambda place: (-tokens[place], rows[place].sequence_id)):
        rank = rows[place].rank
        if rank is None or load[rank] + tokens[place] > limit:
            rank = min(range(world), key=lambda rank: (load[rank], rank))
        trainers[place] = rank
        load[rank] += tokens[place]
    return [trainers[place] for place in range(len(rows))]


def place_at_resume(sequences: list[Sequence], ranks: Ranks, slots: int, max_new: int) -> None:
    """Place the sequences of a resumed pool, whose tokens every rank has read; see `assign_ranks`."""
    for part, limit in (
        ([s for s in sequences if not s.finished], slots),
        ([s for s in sequences if s.finished], len(sequences)),
    ):
        for sequence, rank in zip(part, assign_ranks(part, ranks.world, limit, max_new), strict=True):
            _set_rank(sequence, rank, ranks.rank)


def move_sequences(sequences: list[Sequence], targets: list[int], ranks: Ranks) -> list[Sequence]:
    """Move each sequence to its target rank with all its tokens. Collective unless no sequence moves.

    Returns:
        Sequences that left this rank, whose caches can be released.
    """
    moving = [(s, target) for s, target in zip(sequences, targets, strict=True) if s.rank is not None and s.rank != target]
    leaving = [(s, target) for s, target in moving if s.rank == ranks.rank]
    received: list[bytes] = []
    if moving:
        received = ranks.exchange([pack_sequences([s for s, target in leaving if target == rank]) for rank in range(ranks.world)])
    for sequence, target in zip(sequences, targets, strict=True):
        _set_rank(sequence, target, ranks.rank)
    known = {s.sequence_id: s for s in sequences}
    for payload in received:
        unpack_sequences(payload, known)
    return [s for s, _ in leaving]


def _set_rank(sequence: Sequence, rank: int, own: int) -> None:
    """Record a sequence's rank; if that is not this one (`own`), only the number of its tokens remains here."""
    sequence.rank = rank
    if rank == own:
        sequence.remote_length = None
    elif sequence.remote_length is None:
        sequence.remote_length = sequence.length
        sequence.response, sequence.behaviour_logprobs, sequence.token_versions = [], [], []
        sequence.support, sequence.stale_logprobs = [], []


def pack_sequences(sequences: list[Sequence]) -> bytes:
    """The tokens of some sequences as bytes; empty for none."""
    if not sequences:
        return b""
    headers = [
        {name: getattr(s, name) for name in SCALARS} | {name: len(getattr(s, name)) for name in PER_TOKEN} for s in sequences
    ]
    arrays: dict[str, NDArray[np.generic]] = {
        name: np.concatenate([np.asarray(getattr(s, name), dtype=dtype) for s in sequences]) for name, dtype in PER_TOKEN.items()
    }
    arrays |= flatten_supports({s.sequence_id: s.support for s in sequences})
    payload: bytes = save(arrays | {HEADERS: np.frombuffer(json.dumps(headers).encode(), dtype=np.uint8)})
    return payload


def unpack_sequences(payload: bytes, known: dict[int, Sequence]) -> None:
    """Set the tokens of the sequences in `payload` (of `pack_sequences`) in those of `known`, by sequence_id."""
    if not payload:
        return
    arrays = load(payload)
    headers = json.loads(arrays.pop(HEADERS).tobytes())
    columns = {name: _split(arrays.pop(name), [header[name] for header in headers]) for name in PER_TOKEN}
    supports = unflatten_supports(arrays)
    for number, header in enumerate(headers):
        sequence = known[header["sequence_id"]]
        sequence.kept_version = header["kept_version"]
        sequence.support = supports.get(sequence.sequence_id, [])
        for name in PER_TOKEN:
            setattr(sequence, name, columns[name][number])


def _split(column: NDArray[np.generic], sizes: Iterable[int]) -> list[list[float]]:
    return [part.tolist() for part in np.split(column, np.cumsum(list(sizes))[:-1])]
