"""The JSON format of every benchmark, and its figures."""

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
    """A measured figure: name, unit, and spread over `n` repetitions."""

    name: str
    unit: str
    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, name: str, unit: str, values: Sequence[float]) -> Self:
        """Median, minimum and maximum over the repetitions, of which there is at least one."""
        return cls(name, unit, median(values), min(values), max(values), len(values))

    @classmethod
    def tail(cls, name: str, unit: str, values: Sequence[float]) -> Self:
        """The same with the 95th percentile instead of the median."""
        ordered = sorted(values)
        return cls(name, unit, ordered[max(0, round(0.95 * len(ordered)) - 1)], ordered[0], ordered[-1], len(ordered))


def document(bench: str, machine: Machine, settings: dict[str, Any], results: list[Result]) -> dict[str, Any]:
    """The document that `--json` writes."""
    return {
        "bench": bench, "commit": commit(), "machine": asdict(machine), "settings": settings,
        "results": [asdict(result) for result in results],
    }  # fmt: skip


def write(file: Path, document: dict[str, Any]) -> None:
    """Write a document. Raises OSError."""
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """The checkout's commit, with a + if files differ from it; otherwise the installed package's version."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return _installed()
    lines = [
        subprocess.run(["git", "-C", str(checkout), *asked], capture_output=True, text=True, check=False)
        for asked in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    if any(done.returncode for done in lines):
        return _installed()
    return lines[0].stdout.strip() + ("+" if lines[1].stdout.strip() else "")


def _installed() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("oppo-platform")
    except PackageNotFoundError:  # copied files, for example of `python bench/gpu`
        return "unknown"
