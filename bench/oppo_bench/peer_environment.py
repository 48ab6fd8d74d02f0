"""A virtual environment for a peer whose pinned dependencies conflict with ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

READY = "oppo-bench-ready.txt"


class PeerEnvironmentError(RuntimeError):
    """The environment could not be created; the message has pip's last lines."""


@dataclass(frozen=True, slots=True)
class Packages:
    """Dependencies of a peer: `pins` for pip; `first` is installed separately before them."""

    name: str
    pins: tuple[str, ...]
    first: tuple[str, ...] = ()


# TRL 1.13 removed PPOTrainer. transformers has the engine's version, so that both run the same models.
TRL = Packages(
    "TRL", ("trl==1.12.0", "transformers==5.19.0", "accelerate==1.15.0", "datasets==5.2.0", "peft==0.21.2"), ("torch==2.13.0",)
)
TRL_TODAY = Packages("TRL 1.16", ("trl==1.16.0", *TRL.pins[1:]), TRL.first)
MLFLOW = Packages("MLflow", ("mlflow==3.17.2", "psycopg2-binary==2.9.13"))
TRACKIO = Packages("trackio", ("trackio==0.43.0",))
LIBFAKETIME = Packages("libfaketime", ("libfaketime==3.0.1",))
TENSORBOARD = Packages("TensorBoard", ("tensorboard==2.21.0",))


def ensure_environment(folder: Path, packages: Packages, tell: Callable[[str], None]) -> Path:
    """Interpreter of the environment in `folder`, which is created if it is missing or incomplete.

    pip's own settings apply. Raises PeerEnvironmentError when pip fails.
    """
    python, ready = folder / "bin" / "python", folder / READY
    wanted = "\n".join((*packages.first, *packages.pins))
    if ready.exists() and ready.read_text() == wanted:
        return python
    tell(f"making an environment for {packages.name} in {folder}")
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--no-compile", "--disable-pip-version-check"]
    if packages.first:
        tell(f"installing {', '.join(packages.first)}")
        _run([*pip, *packages.first])
    tell(f"installing {packages.name}")
    _run([*pip, *packages.first, *packages.pins])
    ready.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr)[-2000:]
        raise PeerEnvironmentError(f"{' '.join(command)} ended with status {done.returncode}:\n{said}")
