"""Starting points for a spec: what the form's cards and `oppo demo` fill in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """A named choice of `overlap` settings."""

    key: str
    title: str
    says: str
    overlap: dict[str, Any]


PRESETS = (
    Preset(
        "sequential",
        "Sequential",
        "Plain PPO, one stage after the other. The baseline others are measured against.",
        {"intra_step": "off", "inter_step": "off"},
    ),
    Preset(
        "oppo",
        "OPPO",
        "Answers are scored while they are written, and the longest roll over into the next step.",
        {"intra_step": "per_chunk", "inter_step": "defer"},
    ),
)
