"""Sequences behind each other in one row: who sees whom, which go together, and the same weights in the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from oppo_bench.engine.live_bytes import LiveBytes
from oppo_core.models import activation_checkpointing, packed
from oppo_core.models.microbatching import packed_batches
from oppo_core.models.packed import Packed, fused_single, seen
from tests.backends.test_update_memory import gradients_agree


def test_gradients_are_those_of_passes_that_keep_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of our own architecture; others, and with adapters, in tests/backends."""
    monkeypatch.setattr(activation_checkpointing, "HEAD_SLICE", 7)
    gradients_agree("tiny", None, None)


@given(lengths=st.lists(st.integers(0, 60), max_size=40), budget=st.integers(1, 80))
@settings(max_examples=100, deadline=None)
def test_packed_groups_hold_each_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = packed_batches(lengths, budget)
    assert sorted(row for group in groups for row in group) == [row for row, length in enumerate(lengths) if length]
    sums = [sum(lengths[row] for row in group) for group in groups]
    assert all(total <= budget or len(group) == 1 for group, total in zip(groups, sums, strict=True))
    # No two groups would fit into one: at most one is half empty.
    assert sum(2 * total <= budget for total in sums) <= 1
    assert groups == packed_batches(list(lengths), budget) == sorted(sorted(group) for group in groups)


def test_a_sequence_sees_neither_the_others_nor_beyond_its_reach() -> None:
    lengths, reach = [5, 1, 9], 4
    query, keys, values = torch.randn(3, 1, 4, 15, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    keys, values = keys[:, :2], values[:, :2]
    ours = Packed.of(lengths, torch.device("cpu")).with_windows((None, reach)).attend(1, query, keys, values, 0.3)
    starts = [0, 5, 6]
    for first, length in zip(starts, lengths, strict=True):
        for position in range(length):
            visible = slice(first + max(0, position - reach + 1), first + position + 1)
            for head in range(4):
                weights = torch.softmax(0.3 * query[0, head, first + position] @ keys[0, head // 2, visible].T, -1)
                wanted = weights @ values[0, head // 2, visible]
                torch.testing.assert_close(ours[0, head, first + position], wanted, rtol=0, atol=1e-12)
    assert torch.equal(seen(3, 2, torch.device("cpu")), torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool))
    whole = fused_single(query, keys, values, None, None)
    assert torch.equal(Packed.of([15], torch.device("cpu")).attend(0, query, keys, values), whole)


def test_the_kernel_of_a_gpu_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names and shapes, by torch's own stand-in for tensors: there is no such kernel on a CPU."""
    asked = []
    kernel = packed._kernel()
    assert kernel is not None

    def noted(*given_: Any, **named: Any) -> Any:
        asked.append(named)
        return kernel(*given_, **named)

    monkeypatch.setattr(packed, "_kernel", lambda: noted)
    monkeypatch.setattr(packed, "_is_for_kernel", lambda query, values: True)
    with FakeTensorMode():
        query, keys = torch.empty(1, 4, 15, 64, dtype=torch.bfloat16), torch.empty(1, 2, 15, 64, dtype=torch.bfloat16)
        row = Packed((5, 10), torch.tensor([0, 5, 15], dtype=torch.int32), (None, 4))
        for layer in (0, 1):
            assert row.attend(layer, query, keys, keys, 0.3).shape == query.shape
    assert asked == [{"scale": 0.3, "window_size": (-1, 0)}, {"scale": 0.3, "window_size": (3, 0)}]


def test_bytes_are_counted_until_they_are_let_go_of() -> None:
    with LiveBytes() as counted:
        one = torch.zeros(1000)
        view = one[10:]
        assert counted.live == 4000
        del one
        assert counted.live == 4000, "a view holds on to its storage"
        other = view * 2
        assert counted.live == 4000 + 3960
        del view, other
        assert counted.live == 0
        torch.ones(10).add_(1)
    assert counted.peak == 4000 + 3960
