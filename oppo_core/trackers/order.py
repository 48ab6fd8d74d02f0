"""What a tracker's process is told first: which tracker, and which run. Travels as one line of JSON."""

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
class Order:
    """`settings`: the tracker's section; `spec`: the whole spec as plain data; `out`: the run's folder."""

    tracker: str
    settings: dict[str, Any]
    spec: dict[str, Any]
    out: str

    @property
    def title(self) -> str:
        """The tracker's name, as people write it."""
        return TITLES[self.tracker]

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.spec["name"])

    @property
    def folder(self) -> Path:
        """What trackers keep in the run's folder."""
        return Path(self.out) / "trackers"

    def line(self) -> str:
        """As it travels."""
        return json.dumps({"kind": "order"} | asdict(self))


def order_of(message: dict[str, Any]) -> Order:
    """The order of a line that was read."""
    return Order(**{key: value for key, value in message.items() if key != "kind"})


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
    here = Path(__file__).resolve().parent
    try:
        asked = ["git", "-C", str(here), "rev-parse", "HEAD"]
        told = subprocess.run(asked, capture_output=True, text=True, timeout=GIT_WITHIN_S, check=False)
        kept = subprocess.run(
            ["git", "-C", str(here), "ls-files", "--error-unmatch", __file__],
            capture_output=True,
            timeout=GIT_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # A checkout of something else may lie around an installed engine.
    return told.stdout.strip() or None if told.returncode == 0 and kept.returncode == 0 else None
