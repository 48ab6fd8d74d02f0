"""What each schedule would cost on some devices: one row per schedule, averaged over the steps after the warm-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from oppo_contract.spec import RunSpec
from oppo_contract.spec_errors import SpecError
from oppo_core.simulation.assemble import assemble, steps_of
from oppo_estimate.devices import Devices, DevicesError
from oppo_estimate.schedules import SCHEDULES, Row, Target, summary, variant, warm_up, with_speedups

Told = Callable[[str, int], None]  # of (what, its step)


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
