"""Statistics of the demo: pure functions from API replies to the table and the JSON file.

Times exclude the first `max_age` + 1 steps of both runs, in which OPPO's pool fills.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Statistics of one run. None where unknown: target not reached, run failed early."""

    wall_s: float | None
    step_s: float | None
    us_per_token: float | None
    time_to_target_s: float | None
    bubble: float | None
    occupancy: float | None
    reward: float | None
    deferred_share: float | None
    steps: int


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, with sequential ÷ OPPO if it is meaningful."""

    label: str
    sequential: str
    oppo: str
    ratio: float | None = None


def run_figures(
    comparison: dict[str, Any], run_id: int, elapsed_s: dict[int, float], tokens: dict[int, float], warmup: int
) -> RunFigures:
    """Statistics of one run.

    Args:
        comparison: the reply of `GET compare`.
        elapsed_s: step → training seconds at its end.
        tokens: step → response tokens trained until then.
        warmup: steps to exclude from times.
    """
    statistics = comparison["figures"][str(run_id)]
    reached = comparison["time_to_target"].get(str(run_id))
    last = max(elapsed_s, default=0)
    step_s = us_per_token = None
    if last > warmup and warmup in elapsed_s:
        seconds = elapsed_s[last] - elapsed_s[warmup]
        step_s = seconds / (last - warmup)
        us_per_token = 1e6 * seconds / (tokens[last] - tokens[warmup])
    return RunFigures(
        wall_s=elapsed_s.get(last), step_s=step_s, us_per_token=us_per_token,
        time_to_target_s=reached["elapsed_s"] if reached else None, bubble=statistics["bubble"],
        occupancy=statistics["occupancy"], reward=statistics["reward_last_tenth"],
        deferred_share=statistics["deferred_share"], steps=last,
    )  # fmt: skip


def ratio(before: float | None, after: float | None) -> float | None:
    """before ÷ after; None if either is unknown or zero."""
    return before / after if before and after else None


def table_rows(sequential: RunFigures, oppo: RunFigures) -> list[Row]:
    """Lines of the table."""
    return [
        _row("wall time", sequential.wall_s, oppo.wall_s, "{:.1f} s"),
        _row("time per step", sequential.step_s, oppo.step_s, "{:.3f} s"),
        _row("time per trained token", sequential.us_per_token, oppo.us_per_token, "{:.0f} µs"),
        _row("time to the target reward", sequential.time_to_target_s, oppo.time_to_target_s, "{:.1f} s"),
        _row("bubble share", _percent(sequential.bubble), _percent(oppo.bubble), "{:.0f} %", compare=False),
        _row("decode batch occupancy", _percent(sequential.occupancy), _percent(oppo.occupancy), "{:.0f} %", compare=False),
        _row("final reward (last 10 %)", sequential.reward, oppo.reward, "{:.3f}", compare=False),
        _row("deferred tokens", _percent(sequential.deferred_share), _percent(oppo.deferred_share), "{:.0f} %", compare=False),
    ]


def bench_document(sequential: RunFigures, oppo: RunFigures, settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON format of all benchmarks; one run each, so n is 1."""
    results = []
    units = {
        "step_s": "s", "us_per_token": "us", "reward": "score", "bubble": "share", "occupancy": "share", "wall_s": "s",
        "time_to_target_s": "s", "deferred_share": "share",
    }  # fmt: skip
    for name, figures in (("sequential", sequential), ("oppo", oppo)):
        values = asdict(figures)
        results += [_result(f"{name}/{key}", unit, values[key]) for key, unit in units.items() if values[key] is not None]
    speedups = {
        "speedup": ratio(sequential.step_s, oppo.step_s),
        "speedup_per_token": ratio(sequential.us_per_token, oppo.us_per_token),
        "speedup_to_target": ratio(sequential.time_to_target_s, oppo.time_to_target_s),
    }
    results += [_result(name, "ratio", value) for name, value in speedups.items() if value is not None]
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    return {"bench": "demo", "commit": _commit(), "machine": machine, "settings": settings, "results": results}


def _result(name: str, unit: str, value: float) -> dict[str, Any]:
    return {"name": name, "unit": unit, "median": value, "min": value, "max": value, "n": 1}


def _row(label: str, sequential: float | None, oppo: float | None, template: str, *, compare: bool = True) -> Row:
    texts = [template.format(value) if value is not None else "–" for value in (sequential, oppo)]
    return Row(label, texts[0], texts[1], ratio(sequential, oppo) if compare else None)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _commit() -> str:
    """The commit of the checkout, or the version of an installed wheel."""
    from importlib.metadata import version

    checkout = Path(__file__).parents[2]
    if (checkout / ".git").exists():
        completed = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        if completed.returncode == 0:
            return completed.stdout.strip()
    return version("oppo-platform")
