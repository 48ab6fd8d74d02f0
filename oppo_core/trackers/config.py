"""Configuration of a tracker's process, passed as a JSON file in the run's folder."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TITLES = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "W&B"}
# The module that each tracker imports.
MODULES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
WANDB_KEY = "WANDB_API_KEY"
WANDB_URL = "https://api.wandb.ai"
EXTRA = "in a checkout: pip install '.[trackers]'"
GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class TrackerConfig:
    """Paths are absolute.

    Args:
        tracker: its key in the spec.
        settings: its section there.
        spec: the whole spec as plain data.
        out: the run's folder.
        events: the event log, in which this attempt starts at byte `offset`.
        samples_every: interval in steps at which samples are sent; 0 for none.
    """

    tracker: str
    settings: dict[str, Any]
    spec: dict[str, Any]
    out: str
    events: str = ""
    offset: int = 0
    samples_every: int = 0

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def folder(self) -> Path:
        """The trackers' files in the run's folder."""
        return Path(self.out) / "trackers"

    def file(self, suffix: str) -> Path:
        """`json`: the cursor; `log`: the process's output; `config`: this object; `lock`: held by the process."""
        return self.folder / f"{self.tracker}.{suffix}"

    def save(self) -> Path:
        """Write the file for the process and return its path. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file("config").write_text(json.dumps(asdict(self)))
        return self.file("config")


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """A spec as `section.key` → value, without empty values."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict | list) for item in value)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        items: dict[str, Any] = {}
        for key, inner in pairs:
            items |= flatten(inner, f"{path}.{key}" if path else str(key))
        return items
    if value is None or value == []:
        return {}
    return {path: json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value}


def commit() -> str | None:
    """The git commit of the engine's source, if it runs from a checkout."""
    try:
        _git("ls-files", "--error-unmatch", __file__)  # the engine may be installed inside another checkout
        return _git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True).stdout.strip()
