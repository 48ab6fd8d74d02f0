"""What a recorded run would have taken under other schedules, from its own answers and fitted costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oppo_contract.spec_errors import SpecError
from oppo_core.simulation.assemble import MemoryJournal
from oppo_core.simulation.fit_costs import Fit
from oppo_core.simulation.plan import Told
from oppo_core.simulation.recording import Recording
from oppo_core.simulation.replay import replayed, run
from oppo_estimate.devices import DevicesError
from oppo_estimate.schedules import SCHEDULES, Row, Target, summary, warm_up, with_speedups


@dataclass(frozen=True, slots=True)
class Check:
    """The schedule that was really run, replayed: seconds in all, and the mean absolute error of a step ÷ the mean step."""

    recorded_s: float
    replayed_s: float
    step_error: float

    @property
    def error(self) -> float:
        """How much longer the replay is than the run, as a share."""
        return self.replayed_s / self.recorded_s - 1


def check(recording: Recording, fitted: Fit) -> Check:
    """Replay what was run."""
    engine = replayed(recording, fitted.devices)
    windows = list(run(engine, recording, follow=True))
    errors = [abs(one - step.seconds) for one, step in zip(windows, recording.steps, strict=True)]
    return Check(recording.seconds, sum(windows), sum(errors) / recording.seconds)


def counterfactuals(
    recording: Recording, fitted: Fit, target: Target, overcommits: Iterable[int] = (), progress: Told = lambda what, step: None
) -> list[Row]:
    """One row a schedule, and one for `both` with each Δ of `overcommits`. Δ is as recorded where the run deferred."""
    deferred = recording.spec.overlap.inter_step == "defer"
    wanted: list[tuple[str, str, int | None]] = [(name, name, None) for name in SCHEDULES]
    wanted += [(f"both, Δ = {overcommit}", "both", overcommit) for overcommit in overcommits]
    rows = [_row(recording, fitted, target, *one, follow=deferred and one[2] is None, progress=progress) for one in wanted]
    return with_speedups(rows)


def _row(
    recording: Recording,
    fitted: Fit,
    target: Target,
    label: str,
    schedule: str,
    overcommit: int | None,
    follow: bool,
    progress: Told,
) -> Row:
    try:
        engine = replayed(recording, fitted.devices, schedule, overcommit)
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
