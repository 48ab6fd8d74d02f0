"""Durations of a recorded run under other schedules, from its own answers and fitted costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from oppo_contract.spec_errors import SpecError
from oppo_core.simulation.assemble import MemoryJournal
from oppo_core.simulation.fit_costs import Fit
from oppo_core.simulation.plan import Progress, no_progress
from oppo_core.simulation.recording import Recording
from oppo_core.simulation.replay import build_replay, run, unfinished, with_count
from oppo_estimate.devices import Devices, DevicesError
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


@dataclass(frozen=True, slots=True)
class Change:
    """What differs from the recorded run; None: as recorded. `schedule`: of `SCHEDULES`; `devices`: their number."""

    label: str
    schedule: str | None = None
    overcommit: int | None = None
    batch_size: int | None = None
    devices: int | None = None

    def applied(self, devices: Devices) -> Devices:
        """The devices of the changed run."""
        return devices if self.devices is None else with_count(devices, self.devices)


def changes(overcommits: Iterable[int] = (), batch_sizes: Iterable[int] = (), counts: Iterable[int] = ()) -> list[Change]:
    """Every schedule; `both` with each Δ; and the recorded schedule with each B, and on each number of devices."""
    return [
        *(Change(name, name) for name in SCHEDULES),
        *(Change(f"both, Δ = {n}", "both", overcommit=n) for n in overcommits),
        *(Change(f"as recorded, B = {n}", batch_size=n) for n in batch_sizes),
        *(Change(f"as recorded, devices: {n}", devices=n) for n in counts),
    ]


def counterfactuals(
    recording: Recording, fitted: Fit, target: Target, changed: Iterable[Change], progress: Progress = no_progress
) -> list[Row]:
    """One row per change. Δ is the recorded one if the run deferred and neither Δ nor B is changed."""
    begun = unfinished(recording, fitted.devices)
    return with_speedups([_row(recording, fitted, begun, target, change, progress) for change in changed])


def _recorded_share(recording: Recording, batch_size: int) -> int:
    """Steps of a batch size that train as many answers as were recorded: the lengths of others are not known."""
    count = len(recording.steps)
    return min(count, count * recording.spec.ppo.batch_size // batch_size)


def _row(
    recording: Recording, fitted: Fit, begun: Mapping[int, int], target: Target, change: Change, progress: Progress
) -> Row:  # fmt: skip
    try:
        devices = change.applied(fitted.devices)
        engine = build_replay(recording, devices, change.schedule, change.overcommit, change.batch_size, begun)
    except SpecError as error:
        return Row(change.label, problem="; ".join(str(problem) for problem in error.problems))
    except DevicesError as error:
        return Row(change.label, problem=str(error))
    deferred = recording.spec.overlap.inter_step == "defer" and engine.spec.overlap.inter_step != "off"
    follow = deferred and change.overcommit is None and change.batch_size is None
    for number, _ in enumerate(run(engine, recording, follow), start=1):
        progress(change.label, number)
    assert isinstance(engine.journal, MemoryJournal)
    warm, known = warm_up(recording.spec, len(recording.steps)), _recorded_share(recording, engine.spec.ppo.batch_size)
    metrics = engine.journal.steps[warm : max(warm + 1, known)]
    return summary(change.label, metrics, devices, target)
