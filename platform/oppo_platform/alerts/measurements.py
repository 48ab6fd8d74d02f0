"""Measures runs with new steps for alert rules: the last few points of a few series, of many runs in one query.

Whole series are not read: `policy.RewardMemory` summarizes the reward's earlier course.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
# Metrics with a value in every step, so NaN is a fault. Other metrics are NaN where they are undefined.
FINITE = ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "critic/vf_loss", "critic/grad_norm", REWARD, KL)
SKIPPED = "oppo/nonfinite_steps"
MAX_DEVICES = 256  # for idle shares: engines choose the names of their devices
MAX_STEPS = 2000  # of a run that was never evaluated, or went back to an older checkpoint
Fault = tuple[int, str]  # step and description, a sentence
NO_POINTS: Points = (np.empty(0, np.int32), np.empty(0))


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of one run. None: unknown.

    Attributes:
        kl: mean of the window, nats per sequence.
        bubble: idle share, mean over the window and the devices.
        reward: its course up to `reward_step`, reported by the attempt `epoch`.
        nonfinite: the last recent step with a non-finite value.
    """

    kl: float | None
    bubble: float | None
    reward: RewardMemory
    reward_step: int
    epoch: int
    nonfinite: Fault | None


def measure(runs: Sequence[Run], rules: Mapping[int, Rules]) -> dict[int, Measurements]:
    """Measurements by run id; runs without steps are left out.

    Args:
        runs: with project and watch joined.
        rules: by team id.
    """
    parts = {run_id: ranges for run_id, ranges in attempt_ranges_by_run(runs).items() if ranges}
    started = [run for run in runs if run.pk in parts]
    memories = {run.pk: _memory(run.watch, parts[run.pk][-1]) for run in started}
    within = {run.pk: _within(run, rules[run.project.team_id], memories[run.pk][1]) for run in started}
    keys = {*FINITE, *(f"bubble/{device}" for ranges in parts.values() for device in _devices(ranges[-1]))}
    points = read_points(parts, keys, within) if started else {}
    skipped = _skipped(parts)
    return {
        run.pk: _measurements(
            parts[run.pk][-1],
            {key: points.get((run.pk, key), NO_POINTS) for key in keys},
            rules[run.project.team_id],
            *memories[run.pk],
            skipped.get(run.pk),
        )
        for run in started
    }


def _memory(watch: Watch, newest: AttemptRange) -> tuple[RewardMemory, int]:
    """The stored memory and its last step; empty if a newer attempt repeats some of its steps."""
    if newest.attempt.epoch != watch.reward_epoch and newest.first <= watch.reward_step:
        return RewardMemory(), 0
    return RewardMemory(**watch.reward), watch.reward_step


def _within(run: Run, rules: Rules, remembered: int) -> Range:
    longest = max(rule.window_steps or 0 for rule in rules.values())
    return Range(after=max(min(remembered, run.step - longest), run.step - MAX_STEPS, 0))


def _measurements(
    newest: AttemptRange, points: Mapping[str, Points], rules: Rules, memory: RewardMemory, remembered: int, skipped: Fault | None
) -> Measurements:
    steps, values = points[REWARD]
    window = rules[Condition.REWARD_COLLAPSED].window_steps or 1
    for value in values[np.searchsorted(steps, remembered, side="right") :].tolist():
        memory = memory.updated(value, window)
    return Measurements(
        kl=window_mean(points[KL][1].tolist(), rules[Condition.KL_ABOVE].window_steps or 1),
        bubble=_bubble(_devices(newest), points, rules[Condition.BUBBLE_ABOVE].window_steps or 1),
        reward=memory,
        reward_step=max(remembered, int(steps[-1])) if len(steps) else remembered,
        epoch=newest.attempt.epoch,
        nonfinite=max(filter(None, [_nonfinite(points), skipped]), default=None),
    )


def _devices(newest: AttemptRange) -> list[str]:
    return newest.attempt.device_names[:MAX_DEVICES]


def _bubble(devices: Sequence[str], points: Mapping[str, Points], window: int) -> float | None:
    means = [window_mean(points[f"bubble/{device}"][1].tolist(), window) for device in devices]
    known = [mean for mean in means if mean is not None]
    return fmean(known) if known and len(known) == len(means) else None


def _nonfinite(points: Mapping[str, Points]) -> Fault | None:
    """The last step with a non-finite value of one of the `FINITE` metrics."""
    faults = []
    for key in FINITE:
        steps, values = points[key]
        at = np.flatnonzero(~np.isfinite(values))
        if len(at):
            step, value = int(steps[at[-1]]), float(values[at[-1]])
            faults.append((step, f"{key} was {'NaN' if math.isnan(value) else 'infinite'} in step {step}."))
    return max(faults, default=None)


def _skipped(parts: Mapping[int, Sequence[AttemptRange]]) -> dict[int, Fault]:
    """The last step of each run that its engine skipped because a value was not finite."""
    newest = {ranges[-1].attempt.pk: run_id for run_id, ranges in parts.items()}
    counted = Run.objects.filter(pk__in=parts).annotate(skipped=KeyTextTransform(SKIPPED, "latest"))
    some = counted.exclude(skipped=None).exclude(skipped__in=("0", "0.0")).values_list("pk", flat=True)
    attempts = [attempt_id for attempt_id, run_id in newest.items() if run_id in set(some)]
    decisions = Decision.objects.filter(attempt__in=attempts, controller="nonfinite").order_by("attempt", "-step", "-id")
    return {
        newest[last.attempt_id]: (last.step, f"Step {last.step} was skipped: {last.reason}")
        for last in decisions.distinct("attempt")
    }
