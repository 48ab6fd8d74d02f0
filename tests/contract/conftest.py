"""The smallest valid spec."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def minimal() -> dict[str, Any]:
    """The smallest valid spec, plain data; a test may change it."""
    return {
        "name": "smallest",
        "steps": 1,
        "models": {"actor": {"path": "actor"}, "reward": {"model": {"path": "reward"}}},
        "data": {"prompts": "prompts.jsonl"},
    }
