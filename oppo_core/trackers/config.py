"""Which tracker a process serves, and for which run. Passed to the process as a JSON file in the run's folder."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TITLES = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "W&B"}
# What has to be installed for each: the module that is imported, and the extra that brings it.
MODULES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
WANDB_KEY = "WANDB_API_KEY"
WANDB_URL = "https://api.wandb.ai"
EXTRA = "in a checkout: pip install '.[trackers]'"
GIT_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class TrackerConfig:
    """Paths are absolute.

    Args:
        tracker: its key in the spec.
        settings: its section there.
        spec: the whole spec as plain data.
        out: the run's folder.
        events: the event log, in which this attempt begins at byte `offset`.
        samples_every: the samples of every so many steps are sent; 0: none.
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
        """The run's name."""
        return str(self.spec["name"])

    @property
    def folder(self) -> Path:
        """What trackers keep in the run's folder."""
        return Path(self.out) / "trackers"

    def file(self, suffix: str) -> Path:
        """`json`: the cursor; `log`: the process's output; `config`: this object; `lock`: held by the process."""
        return self.folder / f"{self.tracker}.{suffix}"

    def save(self) -> Path:
        """Write it for the process. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file("config").write_text(json.dumps(asdict(self)))
        return self.file("config")


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """A spec as `section.key` → value; what is empty is left out."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict | list) for item in value)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        found: dict[str, Any] = {}
        for key, inner in pairs:
            found |= flat(inner, f"{path}.{key}" if path else str(key))
        return found
    if value is None or value == []:
        return {}
    return {path: json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value}


def commit() -> str | None:
    """The git commit of the engine's own source, where it runs from a checkout."""
    try:
        _git("ls-files", "--error-unmatch", __file__)  # a checkout of something else may contain an installed engine
        return _git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=GIT_WITHIN_S, check=True).stdout.strip()
