"""The example specs and the letters task, in a checkout or inside an installed wheel."""

from __future__ import annotations

import sys
from pathlib import Path

DEMO = ("sequential", "oppo")
EXAMPLES = (*DEMO, "rule", "grpo")
_PACKED = Path(__file__).parent / "_examples"
_CHECKOUT = Path(__file__).parents[2]


def example_text(name: str) -> str:
    """A spec as YAML. Raises OSError when it is not installed."""
    folder = _PACKED if _PACKED.is_dir() else _CHECKOUT / "examples"
    return (folder / f"{name}.yaml").read_text()


def prepare_command(out: Path) -> tuple[list[str], Path | None]:
    """The command that makes the letters task's models and prompts in `out`, and the folder to run it in (None: any)."""
    if _PACKED.is_dir():
        return [sys.executable, "-m", "oppo_cli._examples.letters.prepare", "--out", str(out)], None
    return [sys.executable, "-m", "examples.letters.prepare", "--out", str(out)], _CHECKOUT
