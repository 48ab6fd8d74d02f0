"""Presets for the submit form and `oppo demo`: of the `overlap` settings, or whole example specs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# In a wheel the files of `examples/` are data of the command line's package.
WHEEL_EXAMPLES = Path(__file__).parents[1] / "oppo_cli" / "_examples"
_CHECKOUT_EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, slots=True)
class Preset:
    """A named choice of `overlap` settings. With `example`, also of everything else: the spec `examples/{example}.yaml`.

    An example `needs` models and prompts of these ids in the catalogue. `command` makes them on a worker.
    """

    key: str
    title: str
    description: str
    overlap: dict[str, Any]
    example: str = ""
    needs: tuple[str, ...] = ()
    command: str = ""


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
EXAMPLES = (
    Preset(
        "sentiment",
        "Example: sentiment",
        "All settings of a first run: SmolLM2-135M learns to complete sentences happily. About four minutes on two CPU cores.",
        {"intra_step": "per_chunk", "inter_step": "off"},
        example="smollm2/sentiment",
        needs=("smollm2/model", "smollm2/sentiment.jsonl", "smollm2/sentiment-heldout.jsonl"),
        command="oppo example smollm2",
    ),
)


def command_for(id: str) -> str:
    """The command that makes a model or prompts of an example on a worker; empty for other ids."""
    return next((preset.command for preset in EXAMPLES if id in preset.needs), "")


def example_text(name: str) -> str:
    """An example spec as YAML. Raises OSError if it is not installed."""
    folder = WHEEL_EXAMPLES if WHEEL_EXAMPLES.is_dir() else _CHECKOUT_EXAMPLES
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")
