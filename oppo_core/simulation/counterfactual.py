"""Durations of a recorded run under other schedules, from its own answers and fitted costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oppo_contract.spec_errors import SpecError
from oppo_core.simulation.assemble import MemoryJournal
from oppo_core.simulation.fit_costs import Fit
from oppo_core.simulation.plan import Progress, no_progress
from oppo_core.simulation.recording import Recording
from oppo_core.simulation.replay import build_replay, run
from oppo_estimate.devices import DevicesError
from oppo_estimate.schedules import SCHEDULES, Row, Target, summary, warm_up, with_speedups


@dataclass(frozen=True, slots=True)
class Check:
    """The recorded schedule replayed: total seconds, and mean absolute error per step ÷ mean step."""

    recorded_s: float
    replayed_s: float
    step_error: float

    @property
    def error(self) -> float:
        """Relative error of the replay's duration."""
        return self.replayed_s / self.recorded_s - 1


def check(recording: Recording, fitted: Fit) -> Check:
    """Replay the recorded schedule."""
    engine = build_replay(recording, fitted.devices)
    windows = list(run(engine, recording, follow=True))
    errors = [abs(one - step.seconds) for one, step in zip(windows, recording.steps, strict=True)]
    return Check(recording.seconds, sum(windows), sum(errors) / recording.seconds)


def counterfactuals(
    recording: Recording,
    fitted: Fit,
    target: Target,
    overcommits: Iterable[int] = (),
    progress: Progress = no_progress,
) -> list[Row]:
    """One row a schedule, and one for `both` with each Δ of `overcommits`. Δ is the recorded one if the run deferred."""
    deferred = recording.spec.overlap.inter_step == "defer"
    variants: list[tuple[str, str, int | None]] = [(name, name, None) for name in SCHEDULES]
    variants += [(f"both, Δ = {overcommit}", "both", overcommit) for overcommit in overcommits]
    rows = [_row(recording, fitted, target, *one, follow=deferred and one[2] is None, progress=progress) for one in variants]
    return with_speedups(rows)


def _row(
    recording: Recording,
    fitted: Fit,
    target: Target,
    label: str,
    schedule: str,
    overcommit: int | None,
    follow: bool,
    progress: Progress,
) -> Row:
    try:
        engine = build_replay(recording, fitted.devices, schedule, overcommit)
    except SpecError as error:
        return Row(label, problem="; ".join(str(problem) for problem in error.problems))
    except DevicesError as error:
        return Row(label, problem=str(error))
    follow = follow and engine.spec.overlap.inter_step != "off"
    for number, _ in enumerate(run(engine, recording, follow), start=1):
        progress(label, number)
    assert isinstance(engine.journal, MemoryJournal)
    metrics = engine.journal.steps[warm_up(recording.spec, len(recording.steps)) :]
    return summary(label, metrics, fitted.devices, target)
