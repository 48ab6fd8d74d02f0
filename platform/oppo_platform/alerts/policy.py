"""Alert conditions: pure functions of a rule and measurements. No database, no clock.

    measured value ──▶ verdict(open?, value, rule) ──▶ open · close · keep

Hysteresis: a condition opens beyond its threshold and closes only some way below it (`SLACK`), so that a value near the threshold
opens one alert. Between the two, and without a measurement, nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple


class Condition(StrEnum):
    """Conditions of a run."""

    FAILED = "failed"
    FINISHED = "finished"
    NOT_FINITE = "not_finite"
    STALLED = "stalled"
    REWARD_COLLAPSED = "reward_collapsed"
    KL_ABOVE = "kl_above"
    BUBBLE_ABOVE = "bubble_above"


# Announcements, which close at once; all others last as long as they hold.
ANNOUNCEMENTS = frozenset({Condition.FAILED, Condition.FINISHED})
# These need devices; the others are about learning, which does not change while a run waits.
OF_WORK = frozenset({Condition.STALLED, Condition.BUBBLE_ABOVE})
# Share of its threshold by which a value must come back before its alert closes.
SLACK = {
    Condition.KL_ABOVE: 0.1,
    Condition.BUBBLE_ABOVE: 0.05,
    Condition.REWARD_COLLAPSED: 0.5,
}
STALL_PACES = 10.0  # a step may take this many times the run's typical step
FIRST_STEP_FACTOR = 3.0  # and the first one of an attempt this many times the minimum
LARGEST = 1e100  # larger values cannot be squared and summed, and are not measurements
SURE = 3.0  # standard errors by which a gain and a drop of reward must exceed noise

Verdict = Literal["open", "close", "keep"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition as configured by a team. Inapplicable fields are None.

    Attributes:
        on: whether the condition is enabled.
        threshold: kl_above: nats per sequence; bubble_above: idle share of device time, 0 to 1; reward_collapsed:
        lost share of the
            gain; stalled: minutes that a step may take at least.
        window_steps: steps over which the value is smoothed; not_finite: steps after the last such value until the
        alert closes.
    """

    on: bool = True
    threshold: float | None = None
    window_steps: int | None = None


class Limits(NamedTuple):
    """Bounds and unit of a threshold."""

    least: float
    most: float
    unit: str


DEFAULTS: dict[Condition, Rule] = {
    Condition.FAILED: Rule(),
    Condition.FINISHED: Rule(),
    Condition.NOT_FINITE: Rule(window_steps=20),
    Condition.STALLED: Rule(threshold=10.0),
    Condition.REWARD_COLLAPSED: Rule(threshold=0.5, window_steps=20),
    Condition.KL_ABOVE: Rule(threshold=50.0, window_steps=20),
    Condition.BUBBLE_ABOVE: Rule(threshold=0.8, window_steps=20),
}
LIMITS: dict[Condition, Limits] = {
    Condition.STALLED: Limits(1, 10_080, "minutes"),
    Condition.REWARD_COLLAPSED: Limits(0.05, 10, "of the gain"),
    Condition.KL_ABOVE: Limits(0.001, 1e6, "nats per sequence"),
    Condition.BUBBLE_ABOVE: Limits(0.01, 0.99, "of device time"),
}
WINDOW_LIMITS = (2, 500)


def problem_with(condition: Condition, rule: Rule) -> str:
    """Why a rule is invalid, a sentence; empty if it is valid."""
    limits, least, most = LIMITS.get(condition), *WINDOW_LIMITS
    if limits is not None:
        threshold = rule.threshold
        if threshold is None or not math.isfinite(threshold) or not limits.least <= threshold <= limits.most:
            return f"{condition}: the threshold must be a number from {limits.least:g} to {limits.most:g} {limits.unit}."
    if DEFAULTS[condition].window_steps is not None and (rule.window_steps is None or not least <= rule.window_steps <= most):
        return f"{condition}: the window must be an integer number of steps from {least} to {most}."
    return ""


def crossed(is_open: bool, value: float | None, threshold: float, slack: float) -> Verdict:
    """Verdict for a value with an upper threshold; None: no measurement.

    Args:
        slack: share of the threshold by which the value must be below it again.
    """
    if value is None:
        return "keep"
    if not is_open:
        return "open" if value > threshold else "keep"
    return "close" if value < threshold * (1.0 - slack) else "keep"


def window_mean(values: Sequence[float], window: int) -> float | None:
    """Mean of the last `window` values; None if there are fewer, or one is not finite or beyond `LARGEST`."""
    last = values[-window:]
    if len(last) < window or not all(abs(value) < LARGEST for value in last):
        return None
    return math.fsum(last) / window


@dataclass(frozen=True, slots=True)
class RewardMemory:
    """Running summary of the reward. `after` adds a step.

    Attributes:
        count: finite values so far.
        level: their smoothed value: the mean of the first `window` of them, an exponential average from then on.
        noise: smoothed square of a value's distance from the previous level.
        start: the level after `window` values, from which the gain is counted.
        best: the highest level that is not due to one lucky batch: the level where `sure` was highest.
        sure: the level there, less `SURE` standard errors.
    """

    count: int = 0
    level: float = 0.0
    noise: float = 0.0
    start: float | None = None
    best: float | None = None
    sure: float = 0.0

    def after(self, value: float, window: int) -> RewardMemory:
        """With one more step's mean reward. Non-finite values, and those too large to be squared, are left out."""
        if not abs(value) < LARGEST:
            return self
        count = self.count + 1
        weight = max(1.0 / count, 2.0 / (window + 1))
        off = value - self.level
        level = self.level + weight * off
        noise = self.noise + weight * (off * off - self.noise) if count > 1 else 0.0
        updated = replace(self, count=count, level=level, noise=noise)
        if count < window:
            return updated
        if self.start is None:
            return replace(updated, start=level, best=level, sure=level)
        sure = level - SURE * updated.error(window)
        return replace(updated, best=level, sure=sure) if sure > self.sure else updated

    def error(self, window: int) -> float:
        """Standard error of the level: an exponential average with weight 2 / (window + 1) has that of a mean of `window`."""
        return math.sqrt(self.noise / window)


@dataclass(frozen=True, slots=True)
class Fall:
    """Distance of the smoothed reward from its best. `share`: of the gain from `start` to `best`; None without a significant
    gain. `stands_out`: whether gain and fall exceed noise."""

    share: float | None
    stands_out: bool


def measure_fall(memory: RewardMemory, window: int) -> Fall:
    """The fall according to a memory."""
    if memory.start is None or memory.best is None:
        return Fall(None, False)
    gain, drop = memory.best - memory.start, memory.best - memory.level
    error = memory.error(window)
    if gain <= 0.0:
        return Fall(None, False)
    share = max(-LARGEST, min(drop / gain, LARGEST))  # a tiny gain divides to infinity
    return Fall(share, gain > SURE * error and drop > SURE * error)


def collapsed(is_open: bool, memory: RewardMemory, rule: Rule) -> Verdict:
    """Whether the reward has lost more than the rule's share of its gain. Noise neither opens nor closes an alert."""
    if rule.threshold is None or rule.window_steps is None:
        return "keep"
    fall = measure_fall(memory, rule.window_steps)
    if not is_open and not fall.stands_out:
        return "keep"
    return crossed(is_open, fall.share, rule.threshold, SLACK[Condition.REWARD_COLLAPSED])


def stall_limit_s(rule: Rule, pace_s: float | None) -> float:
    """Seconds without a step after which a run counts as stalled.

    Args:
        pace_s: duration of its steps; None before the first one of the attempt.
    """
    least_s = 60.0 * (rule.threshold or 0.0)
    return least_s * FIRST_STEP_FACTOR if pace_s is None else max(least_s, STALL_PACES * pace_s)


def stalled(is_open: bool, silent_s: float, limit_s: float) -> Verdict:
    """Whether a training run has been silent for too long. A step closes the alert at once."""
    return crossed(is_open, silent_s, limit_s, 0.0)


def unfinite(is_open: bool, last_at: int | None, step: int, rule: Rule) -> Verdict:
    """Whether a value was not finite within the last steps.

    Args:
        last_at: the last step with such a value; None without a recent one.
        step: the newest step.
    """
    recent = last_at is not None and step - last_at < (rule.window_steps or 1)
    if is_open:
        return "keep" if recent else "close"
    return "open" if recent else "keep"
