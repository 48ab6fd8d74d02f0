"""Presets of `overlap` settings, for the submit form and `oppo demo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """A named choice of `overlap` settings."""

    key: str
    title: str
    description: str
    overlap: dict[str, Any]


PRESETS = (
    Preset(
        "sequential",
        "Sequential",
        "Plain PPO, one stage after another. The baseline for comparisons.",
        {"intra_step": "off", "inter_step": "off"},
    ),
    Preset(
        "oppo",
        "OPPO",
        "Responses are scored while they are decoded, and the longest ones are deferred to the next step.",
        {"intra_step": "per_chunk", "inter_step": "defer"},
    ),
)
