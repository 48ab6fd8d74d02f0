"""The examples: the names of their specs, and `oppo example`, which makes the models and prompts that the specs name."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from oppo_cli.home import Failure, Home
from oppo_contract.presets import WHEEL_EXAMPLES


@dataclass(frozen=True, slots=True)
class Example:
    """An example: the module that prepares it, the folder below a models root, and what it takes."""

    module: str
    folder: str
    description: str
    options: tuple[str, ...] = ()


SPECS = ("sequential", "oppo", "rule", "grpo", "smollm2/sentiment", "smollm2/reward_model", "smollm2/arithmetic")
DEMO_STEPS: dict[str, str | int] = {"steps": 150}  # the reward reaches its target within 90 steps and hardly rises afterwards
# The two runs of `oppo demo --model …`, sequential PPO and OPPO: spec, and changes of it. They differ in `overlap` and name only.
DEMO: dict[str, tuple[tuple[str, dict[str, str | int]], ...]] = {
    "letters": (("sequential", DEMO_STEPS), ("oppo", DEMO_STEPS)),
    "smollm2": (
        ("smollm2/sentiment", {"name": "smollm2 sentiment sequential", "overlap.intra_step": "off"}),
        ("smollm2/sentiment", {"name": "smollm2 sentiment OPPO"}),
    ),
}
EXAMPLES = {
    "letters": Example("letters.prepare", "letters", "the demo's language task; half a minute, nothing is downloaded"),
    "own": Example("own.make", "own", "a very small Llama with a reward model; half a minute, nothing is downloaded"),
    "smollm2": Example("smollm2.prepare", "smollm2", "SmolLM2-135M-Instruct; half a minute, 93 MB are downloaded"),
    "smollm2-reward-model": Example(
        "smollm2.prepare", "smollm2", "the same with a reward model of its own responses; some minutes", ("--reward-model",)
    ),
}
_CHECKOUT = Path(__file__).parents[2]


def prepare_command(name: str, models: Path) -> tuple[list[str], Path | None]:
    """The command that creates an example below the folder `models`, and its PYTHONPATH (None in a wheel)."""
    example = EXAMPLES[name]
    out = str(models / example.folder)
    arguments = [out] if name == "own" else ["--out", out]
    in_wheel = WHEEL_EXAMPLES.is_dir()
    package = "oppo_cli._examples" if in_wheel else "examples"
    command = [sys.executable, "-m", f"{package}.{example.module}", *arguments, *example.options]
    return command, None if in_wheel else _CHECKOUT


@click.command(epilog="Examples: " + "; ".join(f"{name}: {e.description}" for name, e in EXAMPLES.items()) + ".")
@click.argument("name", type=click.Choice(list(EXAMPLES)))
@click.option(
    "--models", type=click.Path(file_okay=False, path_type=Path),
    help="Models root to write into. Default: that of `oppo up` on this machine, OPPO_HOME/models.",
)  # fmt: skip
def example(name: str, models: Path | None) -> None:
    """Make the models and prompts of an example, below a models root. What exists is kept.

    A worker with this root offers them within seconds. The specs are printed by `oppo spec example`.
    """
    command, folder = prepare_command(name, models if models is not None else Home.from_environment().models)
    environ = os.environ | ({"PYTHONPATH": str(folder)} if folder is not None else {})
    status = subprocess.run(command, env=environ, check=False).returncode
    if status:
        raise Failure(f"The example {name} could not be made; its command ended with status {status}.")
