"""The smallest valid spec."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

SMALLEST: dict[str, Any] = {
    "name": "smallest",
    "steps": 1,
    "models": {"actor": {"path": "actor"}, "reward": {"model": {"path": "reward"}}},
    "data": {"prompts": "prompts.jsonl"},
}


@pytest.fixture
def minimal() -> dict[str, Any]:
    """The smallest valid spec, plain data; a test may change it."""
    return deepcopy(SMALLEST)
