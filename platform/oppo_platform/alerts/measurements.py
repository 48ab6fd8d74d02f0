"""Measurements for alerts: the last points of a few series of many runs, in one query.

Never a whole series: the reward's past is in its memory (`policy.RewardMemory`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import numpy as np
from django.db.models.fields.json import KeyTextTransform

from oppo_platform.alerts.models import Watch
from oppo_platform.alerts.policy import Condition, RewardMemory, window_mean
from oppo_platform.alerts.rules import Rules
from oppo_platform.runs.models import Run
from oppo_platform.telemetry.metric_reader import AttemptRange, Points, Range, attempt_ranges_by_run, read_points
from oppo_platform.telemetry.models import Decision

REWARD, KL = "critic/score/mean", "objective/kl"
# Metrics that every step reports, so NaN means NaN. Other metrics are NaN where they have no meaning.
FINITE = ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "critic/vf_loss", "critic/grad_norm", REWARD, KL)
SKIPPED = "oppo/nonfinite_steps"
MOST_DEVICES = 256  # engines name their devices themselves
LONGEST_LOOK = 2000  # steps: of a run that was never evaluated, or went back to an older checkpoint
Fault = tuple[int, str]  # the step, and a sentence
NO_POINTS: Points = (np.empty(0, np.int32), np.empty(0))


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one run. None: no measurement.

    Attributes:
        kl: mean over the window, nats per sequence.
        bubble: idle share, mean over window and devices.
        reward: its course up to step `reward_step`, which attempt `epoch` reported.
        unfinite: the last recent step with a non-finite value, and a sentence about it.
    """

    kl: float | None
    bubble: float | None
    reward: RewardMemory
    reward_step: int
    epoch: int
    unfinite: Fault | None


def measure(runs: Sequence[Run], rules: Mapping[int, Rules]) -> dict[int, Measured]:
    """Measurements by run id; runs without steps are left out.

    Args:
        runs: with project and watch joined.
        rules: by team id.
    """
    parts = {run_id: ranges for run_id, ranges in attempt_ranges_by_run(runs).items() if ranges}
    reporting = [run for run in runs if run.pk in parts]
    memories = {run.pk: _memory(run.watch, parts[run.pk][-1]) for run in reporting}
    within = {run.pk: _within(run, rules[run.project.team_id], memories[run.pk][1]) for run in reporting}
    keys = {*FINITE, *(f"bubble/{device}" for ranges in parts.values() for device in _devices(ranges[-1]))}
    points = read_points(parts, keys, within) if reporting else {}
    skipped = _skipped(parts)
    return {
        run.pk: _measured(
            parts[run.pk][-1],
            {key: points.get((run.pk, key), NO_POINTS) for key in keys},
            rules[run.project.team_id],
            *memories[run.pk],
            skipped.get(run.pk),
        )
        for run in reporting
    }


def _memory(watch: Watch, newest: AttemptRange) -> tuple[RewardMemory, int]:
    """The remembered course of the reward and its last step; none if a newer attempt may repeat some of it."""
    if newest.attempt.epoch != watch.reward_epoch and newest.first <= watch.reward_step:
        return RewardMemory(), 0
    return RewardMemory(**watch.reward), watch.reward_step


def _within(run: Run, rules: Rules, remembered: int) -> Range:
    longest = max(rule.window_steps or 0 for rule in rules.values())
    return Range(after=max(min(remembered, run.step - longest), run.step - LONGEST_LOOK, 0))


def _measured(
    newest: AttemptRange, points: Mapping[str, Points], rules: Rules, memory: RewardMemory, remembered: int, skipped: Fault | None
) -> Measured:
    steps, values = points[REWARD]
    window = rules[Condition.REWARD_COLLAPSED].window_steps or 1
    for value in values[np.searchsorted(steps, remembered, side="right") :].tolist():
        memory = memory.after(value, window)
    return Measured(
        kl=window_mean(points[KL][1].tolist(), rules[Condition.KL_ABOVE].window_steps or 1),
        bubble=_bubble(_devices(newest), points, rules[Condition.BUBBLE_ABOVE].window_steps or 1),
        reward=memory,
        reward_step=max(remembered, int(steps[-1])) if len(steps) else remembered,
        epoch=newest.attempt.epoch,
        unfinite=max(filter(None, [_broken(points), skipped]), default=None),
    )


def _devices(newest: AttemptRange) -> list[str]:
    return newest.attempt.device_names[:MOST_DEVICES]


def _bubble(devices: Sequence[str], points: Mapping[str, Points], window: int) -> float | None:
    means = [window_mean(points[f"bubble/{device}"][1].tolist(), window) for device in devices]
    known = [mean for mean in means if mean is not None]
    return fmean(known) if known and len(known) == len(means) else None


def _broken(points: Mapping[str, Points]) -> Fault | None:
    """The last step in which one of the watched metrics was not finite."""
    result = []
    for key in FINITE:
        steps, values = points[key]
        broken = np.flatnonzero(~np.isfinite(values))
        if len(broken):
            step, value = int(steps[broken[-1]]), float(values[broken[-1]])
            result.append((step, f"{key} was {'NaN' if math.isnan(value) else 'infinite'} in step {step}."))
    return max(result, default=None)


def _skipped(parts: Mapping[int, Sequence[AttemptRange]]) -> dict[int, Fault]:
    """The last step of each run that its engine skipped because of a non-finite value."""
    newest = {ranges[-1].attempt.pk: run_id for run_id, ranges in parts.items()}
    counted = Run.objects.filter(pk__in=parts).annotate(skipped=KeyTextTransform(SKIPPED, "latest"))
    some = counted.exclude(skipped=None).exclude(skipped__in=("0", "0.0")).values_list("pk", flat=True)
    attempts = [attempt_id for attempt_id, run_id in newest.items() if run_id in set(some)]
    decisions = Decision.objects.filter(attempt__in=attempts, controller="nonfinite").order_by("attempt", "-step", "-id")
    return {
        newest[last.attempt_id]: (last.step, f"Step {last.step} was skipped: {last.reason}")
        for last in decisions.distinct("attempt")
    }


def as_stored(memory: RewardMemory) -> dict[str, float | int | None]:
    """A memory in the format of `Watch.reward`."""
    return asdict(memory)
