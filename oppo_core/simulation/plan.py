"""What each schedule would cost on some devices: one row per schedule, averaged over the steps after the warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from oppo_contract.spec import RunSpec
from oppo_contract.spec_errors import SpecError
from oppo_core.simulation.assemble import assemble, steps_of
from oppo_estimate.devices import Devices, DevicesError
from oppo_estimate.schedules import SCHEDULES, Row, Target, summary, variant, warm_up, with_speedups

Progress = Callable[[str, int], None]  # called with (schedule, step)


def no_progress(schedule: str, step: int) -> None:
    """The default: progress is not reported."""


def plan(
    spec: RunSpec,
    devices: Devices,
    target: Target,
    steps: int,
    overcommits: Iterable[int] = (),
    schedules: Iterable[str] = tuple(SCHEDULES),
    progress: Progress = no_progress,
) -> list[Row]:
    """One row per schedule, and one for `both` with each fixed Δ of `overcommits`; `progress` is called after every step."""
    variants: list[tuple[str, str, int | None]] = [(name, name, None) for name in schedules]
    variants += [(f"both, Δ = {overcommit}", "both", overcommit) for overcommit in overcommits]
    return with_speedups([_row(spec, devices, target, steps, *one, progress=progress) for one in variants])


def _row(
    spec: RunSpec,
    devices: Devices,
    target: Target,
    steps: int,
    label: str,
    schedule: str,
    overcommit: int | None,
    progress: Progress,
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
