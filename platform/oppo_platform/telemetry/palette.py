"""Colours and hatches of work and idle time, for figures rendered outside the pages.

They equal those of `static/css/tokens.css` and `static/js/charts/plotly-theme.js`; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ThemeName = Literal["light", "dark"]
FORWARD = ("score", "actor-prefill", "actor-forward")
# A second cue besides colour: causes that often appear side by side have different hatches.
HATCH = {"decode": "/", "tail": "x", "score": "\\", "update": "-", "weights": "|", "data": ".", "checkpoint": "+", "eval": "/",
         "unknown": "."}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Palette:
    """One theme: CSS colours by token name."""

    surface: str
    text: str
    text_2: str
    border: str
    phase: dict[str, str]
    idle: dict[str, str]


LIGHT = Palette(
    surface="#ffffff", text="#161b24", text_2="#465060", border="#dfe3e9",
    phase={"decode": "#5d73fd", "actor-forward": "#0b93c4", "reward-prefill": "#c57624", "reference-prefill": "#3f9a72",
           "critic-prefill": "#b073e6", "update-actor": "#1a3665", "update-critic": "#7526c1", "weight-sync": "#7d7d94",
           "checkpoint": "#85490e"},
    idle={"decode": "#3b6be0", "tail": "#a50f2b", "score": "#9e6500", "update": "#4a35b0", "weights": "#33464f",
          "data": "#1c8560", "checkpoint": "#54280c", "eval": "#b044a4", "unknown": "#6c737e"},
)  # fmt: skip
DARK = Palette(
    surface="#14181f", text="#e8ebf0", text_2="#b4bcc8", border="#2a313c",
    phase={"decode": "#657dfc", "actor-forward": "#a9dcff", "reward-prefill": "#dfa802", "reference-prefill": "#4ae3b1",
           "critic-prefill": "#c3a5fe", "update-actor": "#2458e6", "update-critic": "#86529c", "weight-sync": "#909090",
           "checkpoint": "#b3480d"},
    idle={"decode": "#5b9bff", "tail": "#ff8f86", "score": "#f7cf5a", "update": "#cbbfff", "weights": "#9fb0c4",
          "data": "#6ee0b0", "checkpoint": "#b07a46", "eval": "#f08be0", "unknown": "#8b94a1"},
)  # fmt: skip
THEMES: dict[ThemeName, Palette] = {"light": LIGHT, "dark": DARK}


def span_colour(phase: str, role: str) -> str:
    """Token of a span's colour: the hue is the model, the depth the kind of work (`timeline-model.js` does the same)."""
    if phase == "decode" or phase.startswith("update-"):
        return phase
    if phase.endswith("checkpoint"):
        return "checkpoint"
    if phase in FORWARD:
        return "actor-forward" if role == "actor" else f"{role}-prefill"
    return phase if phase in LIGHT.phase else "weight-sync"


def faded(colour: str, alpha: float) -> str:
    """`#rrggbb` with an opacity from 0 to 1."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"
