"""Presets for the submit form and `oppo demo`: of some settings, or whole example specs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oppo_contract.sections.ppo import CRITIC_SETTINGS

# In a wheel the files of `examples/` are data of the command line's package.
WHEEL_EXAMPLES = Path(__file__).parents[1] / "oppo_cli" / "_examples"
_CHECKOUT_EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, slots=True)
class Preset:
    """A named choice of `overlap` settings, and of other `settings` by dotted path; None there means the default.

    With `example`, a choice of everything: the spec `examples/{example}.yaml`. An example `needs` models and prompts of these
    ids in the catalogue. `command` makes them on a worker. `description` says when to take it.
    """

    key: str
    title: str
    description: str
    overlap: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    example: str = ""
    needs: tuple[str, ...] = ()
    command: str = ""


PRESETS = (
    Preset(
        "sequential",
        "Sequential",
        "The baseline, to measure what overlap saves: one stage after another.",
        {"intra_step": "off", "inter_step": "off"},
    ),
    Preset(
        "oppo",
        "OPPO",
        "For most runs: scores responses while they are decoded, and defers the longest ones to the next step.",
        {"intra_step": "per_chunk", "inter_step": "defer"},
    ),
    Preset(
        "grpo",
        "GRPO",
        "When a rule or a final answer decides the reward, or memory is limited: 8 responses per prompt and no critic.",
        {"intra_step": "per_chunk", "inter_step": "defer"},
        settings={
            "ppo.algorithm": "grpo",
            "ppo.group_size": 8,
            # As in the paper: an unbiased estimate, in the loss and not in the reward.
            "ppo.kl.estimator": "k3+",
            "ppo.kl.placement": "loss",
            "models.critic": None,
            **{f"ppo.{name}": None for name in CRITIC_SETTINGS},
        },
    ),
)
EXAMPLES = (
    Preset(
        "sentiment",
        "Example: sentiment",
        "For a first run: SmolLM2-135M, a published model, learns to write positive text. About four minutes on two CPU cores.",
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
