"""When an alert opens and closes: pure functions of a rule and of what was measured. No database, no clock.

    measured value ──▶ verdict(open?, value, rule) ──▶ open · close · keep

A condition opens beyond its threshold and closes only some way on this side of it (`SLACK`), so that a value that dances about
the threshold opens one alert. Between the two, and where nothing can be said, everything stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple


class Condition(StrEnum):
    """What a team can be told of a run."""

    FAILED = "failed"
    FINISHED = "finished"
    NOT_FINITE = "not_finite"
    STALLED = "stalled"
    REWARD_COLLAPSED = "reward_collapsed"
    KL_ABOVE = "kl_above"
    BUBBLE_ABOVE = "bubble_above"


# Told once and over at once; all others last for as long as they hold.
ANNOUNCEMENTS = frozenset({Condition.FAILED, Condition.FINISHED})
# Without devices these do not hold; the others are about what was learned, which stays as it is while a run waits.
OF_WORK = frozenset({Condition.STALLED, Condition.BUBBLE_ABOVE})
# The share of its threshold by which a value must come back before its alert closes.
SLACK = {
    Condition.KL_ABOVE: 0.1,
    Condition.BUBBLE_ABOVE: 0.05,
    Condition.REWARD_COLLAPSED: 0.5,
}
STALL_PACES = 10.0  # a step may take so many times as long as the run's steps do
FIRST_STEP_FACTOR = 3.0  # and the first one of an attempt so many times the least
LARGEST = 1e100  # what is beyond cannot be squared and added up, and is no measurement
SURE = 3.0  # standard errors by which a gain and a drop of reward must stand out of its noise

Verdict = Literal["open", "close", "keep"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition as a team wants it. What a condition does not have is None.

    Attributes:
        on: whether it is told at all.
        threshold: kl_above: nats a sequence; bubble_above: idle share of device time, 0 to 1; reward_collapsed: share of the gain
            that is lost again; stalled: minutes that a step may take at least.
        window_steps: over how many steps the value is smoothed; not_finite: how long ago the last one must be for it to be over.
    """

    on: bool = True
    threshold: float | None = None
    window_steps: int | None = None


class Limits(NamedTuple):
    """Between which numbers a threshold may be, in which unit."""

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
    """What is wrong with a rule, a sentence; empty when nothing is."""
    limits, least, most = LIMITS.get(condition), *WINDOW_LIMITS
    if limits is not None:
        asked = rule.threshold
        if asked is None or not math.isfinite(asked) or not limits.least <= asked <= limits.most:
            return f"{condition}: the threshold must be a number from {limits.least:g} to {limits.most:g} {limits.unit}."
    if DEFAULTS[condition].window_steps is not None and (rule.window_steps is None or not least <= rule.window_steps <= most):
        return f"{condition}: the window must be an integer number of steps from {least} to {most}."
    return ""


def crossed(is_open: bool, value: float | None, threshold: float, slack: float) -> Verdict:
    """For a value that shall not be above a threshold; None: nothing can be said.

    Args:
        slack: share of the threshold by which the value must be below it again.
    """
    if value is None:
        return "keep"
    if not is_open:
        return "open" if value > threshold else "keep"
    return "close" if value < threshold * (1.0 - slack) else "keep"


def window_mean(values: Sequence[float], window: int) -> float | None:
    """Mean of the last `window` values; None when there are fewer, or one of them is not finite or beyond `LARGEST`."""
    last = values[-window:]
    if len(last) < window or not all(abs(value) < LARGEST for value in last):
        return None
    return math.fsum(last) / window


@dataclass(frozen=True, slots=True)
class RewardMemory:
    """The reward's course so far, in a few numbers. `after` adds a step.

    Attributes:
        count: finite values so far.
        level: their smoothed value: the mean of the first `window` of them, an exponential average from there on.
        noise: smoothed square of a value's distance from the level before it.
        start: the level when there were `window` values; the gain is counted from there.
        best: the highest level since that was sure, which one lucky batch does not make: where `sure` was highest.
        sure: the level there, less `SURE` standard errors.
    """

    count: int = 0
    level: float = 0.0
    noise: float = 0.0
    start: float | None = None
    best: float | None = None
    sure: float = 0.0

    def after(self, value: float, window: int) -> RewardMemory:
        """With one more step's mean reward. What is not finite, or too large to be squared, is no reward, and is left out."""
        if not abs(value) < LARGEST:
            return self
        count = self.count + 1
        weight = max(1.0 / count, 2.0 / (window + 1))
        off = value - self.level
        level = self.level + weight * off
        noise = self.noise + weight * (off * off - self.noise) if count > 1 else 0.0
        told = replace(self, count=count, level=level, noise=noise)
        if count < window:
            return told
        if self.start is None:
            return replace(told, start=level, best=level, sure=level)
        sure = level - SURE * told.error(window)
        return replace(told, best=level, sure=sure) if sure > self.sure else told

    def error(self, window: int) -> float:
        """Standard error of the level: an exponential average with weight 2 / (window + 1) has that of a mean of `window`."""
        return math.sqrt(self.noise / window)


@dataclass(frozen=True, slots=True)
class Fall:
    """How far the smoothed reward is below its best. `share`: of the gain from `start` to `best`; None when there is no gain to
    speak of. `stands_out`: whether gain and fall are more than noise."""

    share: float | None
    stands_out: bool


def fall_of(memory: RewardMemory, window: int) -> Fall:
    """What a memory says about a collapse."""
    if memory.start is None or memory.best is None:
        return Fall(None, False)
    gain, drop = memory.best - memory.start, memory.best - memory.level
    error = memory.error(window)
    if gain <= 0.0:
        return Fall(None, False)
    share = max(-LARGEST, min(drop / gain, LARGEST))  # a tiny gain divides to infinity
    return Fall(share, gain > SURE * error and drop > SURE * error)


def collapsed(is_open: bool, memory: RewardMemory, rule: Rule) -> Verdict:
    """Whether the reward has fallen by more than the rule's share of its gain. Noise opens no alert, and closes none either."""
    if rule.threshold is None or rule.window_steps is None:
        return "keep"
    fall = fall_of(memory, rule.window_steps)
    if not is_open and not fall.stands_out:
        return "keep"
    return crossed(is_open, fall.share, rule.threshold, SLACK[Condition.REWARD_COLLAPSED])


def stall_limit_s(rule: Rule, pace_s: float | None) -> float:
    """Seconds without a step after which a run counts as stalled.

    Args:
        pace_s: what its steps take; None before the first one of the attempt.
    """
    least_s = 60.0 * (rule.threshold or 0.0)
    return least_s * FIRST_STEP_FACTOR if pace_s is None else max(least_s, STALL_PACES * pace_s)


def stalled(is_open: bool, silent_s: float, limit_s: float) -> Verdict:
    """Whether a run that trains has been silent for too long. A step ends it at once, because it ends the silence."""
    return crossed(is_open, silent_s, limit_s, 0.0)


def unfinite(is_open: bool, last_at: int | None, step: int, rule: Rule) -> Verdict:
    """Whether something was not finite within the last steps.

    Args:
        last_at: the last step with such a value; None when there is none near.
        step: the newest step.
    """
    recent = last_at is not None and step - last_at < (rule.window_steps or 1)
    if is_open:
        return "keep" if recent else "close"
    return "open" if recent else "keep"
