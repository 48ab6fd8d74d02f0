"""Small specs and devices with round costs, so that times can be worked out by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from oppo_contract.spec import RunSpec, load_spec
from oppo_core.engine.state import Engine
from oppo_core.simulation.assemble import assemble
from oppo_estimate.devices import Devices, load_devices

Tree = dict[str, Any]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def merged(base: Tree, *changes: Tree) -> Tree:
    """`base` with nested `changes` laid over it."""
    result = copy.deepcopy(base)
    for change in changes:
        for key, value in change.items():
            known = result.get(key)
            result[key] = merged(known, value) if isinstance(value, dict) and isinstance(known, dict) else copy.deepcopy(value)
    return result


def small_spec(*changes: Tree) -> RunSpec:
    """B = 2, C = 2, nothing overlaps; `changes` laid over it."""
    base: Tree = {
        "name": "virtual", "steps": 1, "data": {"prompts": "none"},
        "models": {"actor": {"path": "none"}, "reward": {"model": {"path": "none"}}},
        "ppo": {"batch_size": 2, "micro_batch_tokens": 100_000}, "rollout": {"max_new_tokens": 1000, "max_prompt_tokens": 1},
        "overlap": {
            "intra_step": "off", "inter_step": "off", "chunk": {"size": 2},
            "overcommit": {"controller": "fixed", "initial": 1, "min": 0, "max": 2},
        },
        "logging": {"samples_per_step": 0}, "checkpoints": {"every_steps": 1000},
    }  # fmt: skip
    return load_spec(merged(base, *changes))


def even_devices(**changes: Any) -> Devices:
    """One device for the actor, one for the scorers; µs: round 1,000, row 100, reading 50 a token, backward pass 100."""
    return load_devices("even").model_copy(update=changes)


def listed(lengths: list[int]) -> Callable[[int], int]:
    """Answer i has `lengths[i]` tokens, from the beginning again after the last."""
    return lambda sequence_id: lengths[sequence_id % len(lengths)]


@pytest.fixture
def small() -> Callable[..., RunSpec]:
    """See `small_spec`."""
    return small_spec


@pytest.fixture
def even() -> Callable[..., Devices]:
    """See `even_devices`."""
    return even_devices


@pytest.fixture
def virtual() -> Callable[..., Engine]:
    """`virtual(overlap, lengths, spec changes…, devices=…)`: an engine on virtual devices."""

    def build(overlap: Tree, lengths: list[int], *changes: Tree, devices: Devices | None = None) -> Engine:
        return assemble(small_spec({"overlap": overlap}, *changes), devices or even_devices(), listed(lengths))

    return build
