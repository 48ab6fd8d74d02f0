"""Which rank decodes and trains which sequence, and that moving one loses nothing of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_core.rollout.placement import assign_ranks, balance_rows, move_sequences
from oppo_core.rollout.sequence import Sequence
from tests.fakes.thread_ranks import on_threads

PROMPT = np.asarray([1])


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Sequence], int, int]:
    """Unfinished sequences, some of them placed, on a number of ranks with a number of slots each."""
    world = draw(st.integers(1, 4))
    count = draw(st.integers(0, 24))
    placed = draw(st.lists(st.one_of(st.none(), st.integers(0, world - 1)), min_size=count, max_size=count))
    lengths = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    rows = [
        Sequence(n, 0, PROMPT, rank=rank, remote_length=length if rank is not None else None)
        for n, (rank, length) in enumerate(zip(placed, lengths, strict=True))
    ]
    return rows, world, -(-count // world) + draw(st.integers(0, 3))


@settings(max_examples=200, deadline=None)
@given(pools())
def test_sequences_stay_with_their_caches_and_new_ones_even_the_load_out(case: tuple[list[Sequence], int, int]) -> None:
    rows, world, slots = case
    assigned = assign_ranks(rows, world, slots, 10)
    assert len(assigned) == len(rows)
    assert all(assigned.count(rank) <= slots for rank in range(world))
    for rank in range(world):
        there = [n for n, row in enumerate(rows) if row.rank == rank]
        assert [assigned[n] for n in there[:slots]] == [rank] * len(there[:slots]), "the oldest stay"
    load = [sum(10 - row.length for row, at in zip(rows, assigned, strict=True) if at == rank) for rank in range(world)]
    for row, at in zip(rows, assigned, strict=True):
        if row.rank is None:
            others = [load[rank] for rank in range(world) if assigned.count(rank) < slots]
            assert load[at] - (10 - row.length) <= min(others, default=load[at]), "another rank had fewer outstanding tokens"


def test_a_sequence_moves_with_everything_that_it_has() -> None:
    def work(ranks: Any) -> Any:
        first = Sequence(7, 0, PROMPT, [1, 2], [-0.5, -1.5], [0, 1], rank=0, kept_version=1, stale_logprobs=[-0.25])
        first.support = [np.asarray([1, 5], dtype=np.int32), np.asarray([255], dtype=np.uint8)]
        second = Sequence(8, 0, PROMPT, rank=None)
        third = Sequence(9, 0, PROMPT, [4], [-2.0], [1], rank=1)
        if ranks.rank != 0:
            first = Sequence(7, 0, PROMPT, rank=0, remote_length=2)
        if ranks.rank != 1:
            third = Sequence(9, 0, PROMPT, rank=1, remote_length=1)
        left = move_sequences([first, second, third], [2, 0, 1], ranks)
        return [s.sequence_id for s in left], first, second, third

    told = on_threads(3, work)
    assert [left for left, *_ in told] == [[7], [], []]
    moved = told[2][1]
    assert (moved.response, moved.behaviour_logprobs, moved.token_versions) == ([1, 2], [-0.5, -1.5], [0, 1])
    assert (moved.stale_logprobs, moved.kept_version, moved.rank, moved.remote_length) == ([-0.25], 1, 2, None)
    assert [(left.dtype, left.tolist()) for left in moved.support] == [(np.int32, [1, 5]), (np.uint8, [255])]
    assert [(s.rank, s.remote_length, s.length) for s in (rank[1] for rank in told[:2])] == [(2, 2, 2)] * 2
    assert not told[0][1].support, "its tokens are gone where it was"
    assert [rank[2].remote_length for rank in told] == [None, 0, 0]
    assert [rank[3].remote_length for rank in told] == [1, None, 1]


@settings(max_examples=200, deadline=None)
@given(pools())
def test_rows_are_balanced_by_tokens(case: tuple[list[Sequence], int, int]) -> None:
    rows, world, _ = case
    if not rows:
        return
    trainers = balance_rows(rows, world)
    sizes = [[1 + row.length for row, at in zip(rows, trainers, strict=True) if at == rank] for rank in range(world)]
    share, longest = sum(map(sum, sizes)) / world, max(map(max, filter(None, sizes)))
    fullest = max(sizes, key=sum)
    assert sum(fullest) <= max(share, longest) or sum(fullest) - min(fullest) <= share, "another rank had fewer tokens"


@pytest.mark.parametrize(
    ("lengths", "loads"),
    [([[100], [100]], [100, 100]), ([[1000, *[60] * 7], [60] * 8], [1000, 900]), ([[1000, *[130] * 3], [130] * 4], [1000, 910])],
    ids=["balanced", "long-tail", "longest-alone"],
)
def test_rows_beside_a_long_one_move(lengths: list[list[int]], loads: list[int]) -> None:
    rows = [
        Sequence(1000 * rank + n, 0, PROMPT, rank=rank, remote_length=length - 1)
        for rank, of_rank in enumerate(lengths)
        for n, length in enumerate(of_rank)
    ]
    trainers = balance_rows(rows, 2)
    assert [sum(1 + row.length for row, at in zip(rows, trainers, strict=True) if at == rank) for rank in (0, 1)] == loads
