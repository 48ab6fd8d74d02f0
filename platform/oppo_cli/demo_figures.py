"""The demo's figures: pure functions from what the API tells to the table and the JSON file.

Times leave out the first `max_age` + 1 steps of both runs, in which OPPO's pool fills and nothing has been deferred long enough.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run. None where the run does not tell: a target that was never reached, a run that failed early."""

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
    """One line of the table: texts, and the ratio in OPPO's favour if there is one."""

    label: str
    sequential: str
    oppo: str
    ratio: float | None = None


def run_figures(
    compared: dict[str, Any], run_id: int, elapsed_s: dict[int, float], tokens: dict[int, float], warm: int
) -> RunFigures:
    """Figures of one run.

    Args:
        compared: the answer of `GET compare`.
        run_id: which run.
        elapsed_s: step → training seconds at its end.
        tokens: step → response tokens trained until then.
        warm: steps to leave out.
    """
    told = compared["figures"][str(run_id)]
    reached = compared["time_to_target"].get(str(run_id))
    last = max(elapsed_s, default=0)
    step_s = us_per_token = None
    if last > warm and warm in elapsed_s:
        seconds = elapsed_s[last] - elapsed_s[warm]
        step_s = seconds / (last - warm)
        us_per_token = 1e6 * seconds / (tokens[last] - tokens[warm])
    return RunFigures(
        wall_s=elapsed_s.get(last), step_s=step_s, us_per_token=us_per_token,
        time_to_target_s=reached["elapsed_s"] if reached else None, bubble=told["bubble"],
        occupancy=told["occupancy"], reward=told["reward_last_tenth"],
        deferred_share=told["deferred_share"], steps=last,
    )  # fmt: skip


def ratio(before: float | None, after: float | None) -> float | None:
    """How many times smaller `after` is; None when either is unknown or zero."""
    return before / after if before and after else None


def table_rows(sequential: RunFigures, oppo: RunFigures) -> list[Row]:
    """The table, line by line."""
    return [
        _row("wall time", sequential.wall_s, oppo.wall_s, "{:.1f} s"),
        _row("time per step", sequential.step_s, oppo.step_s, "{:.3f} s"),
        _row("time per trained token", sequential.us_per_token, oppo.us_per_token, "{:.0f} µs"),
        _row("time to the target reward", sequential.time_to_target_s, oppo.time_to_target_s, "{:.1f} s"),
        _row("bubble share", _percent(sequential.bubble), _percent(oppo.bubble), "{:.0f} %", compare=False),
        _row(
            "decode batch occupancy",
            _percent(sequential.occupancy),
            _percent(oppo.occupancy),
            "{:.0f} %",
            compare=False,
        ),
        _row("final reward (last 10 %)", sequential.reward, oppo.reward, "{:.3f}", compare=False),
        _row("deferred tokens", _percent(sequential.deferred_share), _percent(oppo.deferred_share), "{:.0f} %", compare=False),
    ]


def bench_document(sequential: RunFigures, oppo: RunFigures, settings: dict[str, Any]) -> dict[str, Any]:
    """The bench format that every command of ours writes; one run each, so n is 1."""
    results = []
    units = {
        "step_s": "s", "us_per_token": "us", "reward": "score", "bubble": "share", "occupancy": "share", "wall_s": "s",
        "time_to_target_s": "s", "deferred_share": "share",
    }  # fmt: skip
    for name, figures in (("sequential", sequential), ("oppo", oppo)):
        values = asdict(figures)
        results += [_result(f"{name}/{key}", unit, values[key]) for key, unit in units.items() if values[key] is not None]
    speed = {
        "speedup": ratio(sequential.step_s, oppo.step_s),
        "speedup_per_token": ratio(sequential.us_per_token, oppo.us_per_token),
        "speedup_to_target": ratio(sequential.time_to_target_s, oppo.time_to_target_s),
    }
    results += [_result(name, "ratio", value) for name, value in speed.items() if value is not None]
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    return {"bench": "demo", "commit": _commit(), "machine": machine, "settings": settings, "results": results}


def _result(name: str, unit: str, value: float) -> dict[str, Any]:
    return {"name": name, "unit": unit, "median": value, "min": value, "max": value, "n": 1}


def _row(label: str, sequential: float | None, oppo: float | None, shape: str, *, compare: bool = True) -> Row:
    texts = [shape.format(value) if value is not None else "–" for value in (sequential, oppo)]
    return Row(label, texts[0], texts[1], ratio(sequential, oppo) if compare else None)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _commit() -> str:
    """The checkout's commit; the package's version when installed from a wheel."""
    from importlib.metadata import version

    checkout = Path(__file__).parents[2]
    if (checkout / ".git").exists():
        asked = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            return asked.stdout.strip()
    return version("oppo-platform")
