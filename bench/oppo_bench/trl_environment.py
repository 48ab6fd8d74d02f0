"""TRL in an environment of its own, because it pins other things than the engine and is needed for this bench only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# PPOTrainer left TRL with version 1.13. transformers is the engine's own version, so that both run the same models.
PINS = ("trl==1.12.0", "transformers==5.19.0", "accelerate==1.15.0", "datasets==5.2.0")
TORCH = "torch==2.13.0"
READY = "oppo-bench-ready.txt"


class PeerEnvironmentError(RuntimeError):
    """The environment could not be made; the message holds pip's last words."""


def python_of(folder: Path, tell: Callable[[str], None]) -> Path:
    """The interpreter of the environment in `folder`, which is made when it is missing or was not finished.

    pip's own settings apply. Raises PeerEnvironmentError when pip fails.
    """
    python, ready = folder / "bin" / "python", folder / READY
    wanted = "\n".join((TORCH, *PINS))
    if ready.exists() and ready.read_text() == wanted:
        return python
    tell(f"making TRL's environment in {folder}")
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--no-compile", "--disable-pip-version-check"]
    tell("installing torch into TRL's environment")
    _run([*pip, TORCH])
    tell("installing TRL")
    _run([*pip, TORCH, *PINS])
    ready.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr)[-2000:]
        raise PeerEnvironmentError(f"{' '.join(command)} ended with status {done.returncode}:\n{said}")
