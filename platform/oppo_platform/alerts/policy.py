"""Alert conditions as pure functions of a rule and a measured value, with hysteresis. No database, no clock.

    measured value ──▶ verdict(open?, value, rule) ──▶ open · close · keep

With an upper threshold an alert opens above it and closes below it by a margin (`SLACK`), so that an oscillating value opens one
alert. Between the two, and if the value is unknown, nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple


class Condition(StrEnum):
    """Conditions of a run that alerts report."""

    FAILED = "failed"
    NODE_FAILED = "node_failed"
    FINISHED = "finished"
    NOT_FINITE = "not_finite"
    STALLED = "stalled"
    REWARD_COLLAPSED = "reward_collapsed"
    KL_ABOVE = "kl_above"
    BUBBLE_ABOVE = "bubble_above"


# Announced once, closed when they open; all others stay open while they hold.
ANNOUNCEMENTS = frozenset({Condition.FAILED, Condition.NODE_FAILED, Condition.FINISHED})
# Announcements that may need an action.
FAILURES = frozenset({Condition.FAILED, Condition.NODE_FAILED})
# Closed when the run holds no devices; the others are about training results, which do not change meanwhile.
DEVICE_CONDITIONS = frozenset({Condition.STALLED, Condition.BUBBLE_ABOVE})
# Hysteresis: share of the threshold by which a value must return before its alert closes.
SLACK = {
    Condition.KL_ABOVE: 0.1,
    Condition.BUBBLE_ABOVE: 0.05,
    Condition.REWARD_COLLAPSED: 0.5,
}
STALL_PACES = 10.0  # mean step times after which a step counts as stalled
FIRST_STEP_FACTOR = 3.0  # of the rule's minutes, for the first step of an attempt
LARGEST = 1e100  # larger values would overflow when squared and added
MIN_SIGMAS = 3.0  # standard errors that a gain or a drop of the reward must exceed

Verdict = Literal["open", "close", "keep"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A team's rule for one condition. Fields that do not apply are None.

    Attributes:
        on: whether alerts open.
        threshold: kl_above: nats per sequence; bubble_above: idle share of device time, 0 to 1; reward_collapsed: lost share of
            the gain; stalled: minimum minutes without a step.
        window_steps: steps of the smoothing window; not_finite: steps without a non-finite value until the alert closes.
    """

    on: bool = True
    threshold: float | None = None
    window_steps: int | None = None


class Limits(NamedTuple):
    """Bounds of a threshold, and its unit."""

    least: float
    most: float
    unit: str


DEFAULTS: dict[Condition, Rule] = {
    Condition.FAILED: Rule(),
    Condition.NODE_FAILED: Rule(),
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


def rule_error(condition: Condition, rule: Rule) -> str:
    """The error in a rule, a sentence; empty for a valid rule."""
    limits, least, most = LIMITS.get(condition), *WINDOW_LIMITS
    if limits is not None:
        value = rule.threshold
        if value is None or not math.isfinite(value) or not limits.least <= value <= limits.most:
            return f"{condition}: the threshold must be a number from {limits.least:g} to {limits.most:g} {limits.unit}."
    if DEFAULTS[condition].window_steps is not None and (rule.window_steps is None or not least <= rule.window_steps <= most):
        return f"{condition}: the window must be an integer number of steps from {least} to {most}."
    return ""


def crossed(is_open: bool, value: float | None, threshold: float, slack: float) -> Verdict:
    """Verdict for a value with an upper threshold; None: unknown.

    Args:
        slack: share of the threshold by which the value must be below it to close.
    """
    if value is None:
        return "keep"
    if not is_open:
        return "open" if value > threshold else "keep"
    return "close" if value < threshold * (1.0 - slack) else "keep"


def window_mean(values: Sequence[float], window: int) -> float | None:
    """Mean of the last `window` values; None if there are fewer, or one is not finite or exceeds `LARGEST`."""
    last = values[-window:]
    if len(last) < window or not all(abs(value) < LARGEST for value in last):
        return None
    return math.fsum(last) / window


@dataclass(frozen=True, slots=True)
class RewardMemory:
    """Running statistics of the reward; the fields are stored as JSON.

    Attributes:
        count: finite values so far.
        level: smoothed reward: the mean of the first `window` values, then an exponential moving average.
        noise: smoothed squared deviation of a value from the level before it.
        start: the level after `window` values; the gain is measured from it.
        best: the level at the highest `sure` since then, so that one lucky batch does not count.
        sure: lower confidence bound of that level: level − `MIN_SIGMAS` standard errors.
    """

    count: int = 0
    level: float = 0.0
    noise: float = 0.0
    start: float | None = None
    best: float | None = None
    sure: float = 0.0

    def updated(self, value: float, window: int) -> RewardMemory:
        """The statistics with one more step's mean reward; non-finite and too large values are ignored."""
        if not abs(value) < LARGEST:
            return self
        count = self.count + 1
        weight = max(1.0 / count, 2.0 / (window + 1))
        off = value - self.level
        level = self.level + weight * off
        noise = self.noise + weight * (off * off - self.noise) if count > 1 else 0.0
        memory = replace(self, count=count, level=level, noise=noise)
        if count < window:
            return memory
        if self.start is None:
            return replace(memory, start=level, best=level, sure=level)
        sure = level - MIN_SIGMAS * memory.error(window)
        return replace(memory, best=level, sure=sure) if sure > self.sure else memory

    def error(self, window: int) -> float:
        """Standard error of the level: an EMA with weight 2 / (window + 1) has that of a mean of `window` values."""
        return math.sqrt(self.noise / window)


class RewardDrop(NamedTuple):
    """Drop of the smoothed reward below its best. `share`: of the gain from `start` to `best`; None without a gain.
    `significant`: whether gain and drop both exceed the noise."""

    share: float | None
    significant: bool


def reward_drop(memory: RewardMemory, window: int) -> RewardDrop:
    """The current drop of the reward."""
    if memory.start is None or memory.best is None or memory.best <= memory.start:
        return RewardDrop(None, False)
    gain, drop = memory.best - memory.start, memory.best - memory.level
    noise = MIN_SIGMAS * memory.error(window)
    share = max(-LARGEST, min(drop / gain, LARGEST))  # a tiny gain divides to infinity
    return RewardDrop(share, gain > noise and drop > noise)


def collapsed(is_open: bool, memory: RewardMemory, rule: Rule) -> Verdict:
    """Whether the reward has lost more than the rule's share of its gain. Noise neither opens nor closes an alert."""
    if rule.threshold is None or rule.window_steps is None:
        return "keep"
    drop = reward_drop(memory, rule.window_steps)
    if not is_open and not drop.significant:
        return "keep"
    return crossed(is_open, drop.share, rule.threshold, SLACK[Condition.REWARD_COLLAPSED])


def stall_limit_s(rule: Rule, pace_s: float | None) -> float:
    """Seconds without a step after which a run counts as stalled.

    Args:
        pace_s: mean step time; None before the first step of the attempt.
    """
    least_s = 60.0 * (rule.threshold or 0.0)
    return least_s * FIRST_STEP_FACTOR if pace_s is None else max(least_s, STALL_PACES * pace_s)


def stalled(is_open: bool, silent_s: float, limit_s: float) -> Verdict:
    """Whether a running run has had no step for too long. A new step closes the alert at once."""
    return crossed(is_open, silent_s, limit_s, 0.0)


def nonfinite(is_open: bool, last_at: int | None, step: int, rule: Rule) -> Verdict:
    """Whether a value was not finite within the last steps.

    Args:
        last_at: the last step with such a value, if any.
        step: the newest step.
    """
    recent = last_at is not None and step - last_at < (rule.window_steps or 1)
    if recent == is_open:
        return "keep"
    return "open" if recent else "close"
