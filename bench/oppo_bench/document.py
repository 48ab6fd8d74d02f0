"""The one format that every bench writes, and the figures in it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from oppo_bench.machine_load import Machine


@dataclass(frozen=True, slots=True)
class Result:
    """One measured figure: its name, its unit, and its spread over `n` repetitions."""

    name: str
    unit: str
    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, name: str, unit: str, values: Sequence[float]) -> Self:
        """The figure over its repetitions, of which there is at least one."""
        return cls(name, unit, median(values), min(values), max(values), len(values))

    @classmethod
    def tail(cls, name: str, unit: str, values: Sequence[float]) -> Self:
        """The 95th percentile in the median's place."""
        ordered = sorted(values)
        return cls(name, unit, ordered[max(0, round(0.95 * len(ordered)) - 1)], ordered[0], ordered[-1], len(ordered))


def document(bench: str, machine: Machine, settings: dict[str, Any], results: list[Result]) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "bench": bench, "commit": commit(), "machine": asdict(machine), "settings": settings,
        "results": [asdict(result) for result in results],
    }  # fmt: skip


def write(file: Path, document: dict[str, Any]) -> None:
    """Write a document. Raises OSError."""
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """The checkout's commit, with a + when files differ from it; else the installed package's version, if it is installed."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return _installed()
    told = [
        subprocess.run(["git", "-C", str(checkout), *asked], capture_output=True, text=True, check=False)
        for asked in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    if any(done.returncode for done in told):
        return _installed()
    return told[0].stdout.strip() + ("+" if told[1].stdout.strip() else "")


def _installed() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("oppo-platform")
    except PackageNotFoundError:  # copied files, as `python bench/gpu` may be run from
        return "unknown"
