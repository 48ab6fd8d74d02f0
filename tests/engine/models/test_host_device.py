"""What moves between host and device moves in few copies, and comes out as it went in."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from oppo_core.models.host_device import on_host, to_device
from oppo_core.models.incremental_prefill import IncrementalPrefill

WAITS = {"item", "tolist", "cpu", "numpy"}


def waiting_calls(function: Callable[..., Any]) -> list[str]:
    """Calls in `function` that would wait for a GPU, were their operand there."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call.attr for call in calls if isinstance(call, ast.Attribute) and call.attr in WAITS]


def test_rows_come_back_together_and_in_their_order() -> None:
    rows = [[torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [], [torch.tensor([4.0])]]
    assert [row.tolist() for row in on_host(rows)] == [[1.0, 2.0, 3.0], [], [4.0]]
    assert [row.tolist() for row in on_host([[], []])] == [[], []]
    assert on_host([]) == []


def test_lists_arrays_and_tensors_go_to_the_device() -> None:
    cpu = torch.device("cpu")
    for given in ([3, 1], np.asarray([3, 1]), torch.tensor([3, 1])):
        moved = to_device(given, cpu)
        assert moved.dtype == torch.int64
        assert moved.tolist() == [3, 1]


def test_reading_asks_the_device_nothing() -> None:
    """`last` is the host's own array: its `tolist` is the one call allowed."""
    assert waiting_calls(IncrementalPrefill._window) == ["tolist"]
    for name in ("read", "_read_whole", "_read_growing", "_record"):
        assert waiting_calls(getattr(IncrementalPrefill, name)) == []
