"""What each schedule would cost on some devices: one row a schedule, averaged over the steps after the start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from oppo_contract.spec import RunSpec
from oppo_contract.spec_errors import SpecError
from oppo_core.simulation.assemble import assemble, steps_of
from oppo_core.simulation.devices import Devices, DevicesError
from oppo_core.simulation.schedules import SCHEDULES, variant

BASELINE = "sequential"
Told = Callable[[str, int], None]  # of (what, its step)


@dataclass(frozen=True, slots=True)
class Target:
    """What "done" means: `steps` PPO steps of a sequential run, more of them where tokens are stale.

    `staleness_cost`: further share of the steps at a deferred-token share of 1 (0: a stale token teaches as much as a fresh one).
    """

    steps: int
    staleness_cost: float = 0.0

    def steps_with(self, stale_share: float) -> float:
        """Steps to the target when this share of the trained tokens is stale."""
        return self.steps * (1 + self.staleness_cost * stale_share)


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule's means a step. `bubble` by device; `problem` instead of everything where the schedule is impossible."""

    schedule: str
    problem: str | None = None
    step_s: float = 0.0
    us_per_token: float = 0.0
    tokens_per_s: float = 0.0
    bubble: dict[str, float] | None = None
    utilization: float = 0.0
    overlap_factor: float = 0.0
    occupancy: float = 0.0
    overcommit: float = 0.0
    deferred_share: float = 0.0
    stale_share: float = 0.0
    age_max: float = 0.0
    response_tokens: float = 0.0
    hours_to_target: float = 0.0
    device_hours: float = 0.0
    speedup: float = 0.0
    decode_share: float = 0.0  # of the step's time
    deferred_age: float = 0.0  # mean age of the answers that had been deferred

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def plan(
    spec: RunSpec,
    devices: Devices,
    target: Target,
    steps: int,
    overcommits: Iterable[int] = (),
    schedules: Iterable[str] = tuple(SCHEDULES),
    progress: Told = lambda what, step: None,
) -> list[Row]:
    """One row a schedule, and one for `both` with each fixed Δ of `overcommits`; `progress` is told of every step.

    `speedup` is the baseline's time to the target ÷ this one's, by time a trained token: what favours short answers in a run's
    first steps is no speed.
    """
    wanted: list[tuple[str, str, int | None]] = [(name, name, None) for name in schedules]
    wanted += [(f"both, Δ = {overcommit}", "both", overcommit) for overcommit in overcommits]
    return with_speedups([_row(spec, devices, target, steps, *one, progress=progress) for one in wanted])


def with_speedups(rows: list[Row]) -> list[Row]:
    """The rows with their speed-up over the sequential one, where there is one."""
    base = next((row for row in rows if row.schedule == BASELINE and not row.problem), None)
    if base is None:
        return rows
    filled = []
    for row in rows:
        known = {name: getattr(row, name) for name in row.__slots__}
        steps = row.hours_to_target / row.step_s if row.step_s else 0.0
        base_steps = base.hours_to_target / base.step_s
        speedup = base.us_per_token * base_steps / (row.us_per_token * steps) if steps else 0.0
        filled.append(Row(**known | {"speedup": speedup}))
    return filled


def _row(
    spec: RunSpec, devices: Devices, target: Target, steps: int, label: str, schedule: str, overcommit: int | None, progress: Told
) -> Row:
    try:
        engine = assemble(variant(spec, schedule, steps, overcommit), devices)
    except SpecError as error:
        return Row(label, problem="; ".join(str(problem) for problem in error.problems))
    except DevicesError as error:
        return Row(label, problem=str(error))
    metrics = []
    for step in steps_of(engine):
        metrics.append(step)
        progress(label, len(metrics))
    return summary(label, metrics[warm_up(spec, steps) :], devices, target)


def warm_up(spec: RunSpec, steps: int) -> int:
    """First steps to leave out: until the pool is as it will be."""
    return min(spec.overlap.max_age + 1, steps - 1)


def summary(schedule: str, metrics: list[dict[str, float]], devices: Devices, target: Target) -> Row:
    """A row from the metrics of some steps."""

    def mean(name: str) -> float:
        return fmean(step.get(name, 0.0) for step in metrics)

    seconds = sum(step["timing_s/step"] for step in metrics)
    tokens = sum(step["perf/total_num_tokens"] for step in metrics)
    bubble = {device: mean(f"bubble/{device}") for device in devices.names}
    stale = mean("oppo/deferred_token_share")
    hours = target.steps_with(stale) * seconds / len(metrics) / 3600
    return Row(
        schedule, None, seconds / len(metrics), 1e6 * seconds / tokens, tokens / seconds, bubble, 1 - fmean(bubble.values()),
        mean("overlap_factor"), mean("decode_occupancy"), mean("oppo/overcommit"), mean("oppo/deferred_share"), stale,
        max(step["oppo/age_max"] for step in metrics), mean("response_length/mean"), hours, hours * len(devices.names),
        decode_share=mean("timing_s/gen") * len(metrics) / seconds,
        deferred_age=mean("oppo/age_mean") / mean("oppo/deferred_share") if mean("oppo/deferred_share") else 0.0,
    )  # fmt: skip
