"""Example specs and the letters task, in a checkout or an installed wheel."""

from __future__ import annotations

import sys
from pathlib import Path

DEMO = ("sequential", "oppo")
EXAMPLES = (*DEMO, "rule", "grpo")
_IN_WHEEL = Path(__file__).parent / "_examples"
_CHECKOUT = Path(__file__).parents[2]


def example_text(name: str) -> str:
    """An example spec as YAML. Raises OSError if it is not installed."""
    folder = _IN_WHEEL if _IN_WHEEL.is_dir() else _CHECKOUT / "examples"
    return (folder / f"{name}.yaml").read_text()


def prepare_command(out: Path) -> tuple[list[str], Path | None]:
    """The command that creates models and prompts of the letters task in `out`, and its PYTHONPATH (None in a wheel)."""
    if _IN_WHEEL.is_dir():
        return [sys.executable, "-m", "oppo_cli._examples.letters.prepare", "--out", str(out)], None
    return [sys.executable, "-m", "examples.letters.prepare", "--out", str(out)], _CHECKOUT
