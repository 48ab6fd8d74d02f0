"""Titles and sentences of alerts, for pages, mails and webhooks."""

from __future__ import annotations

from collections.abc import Callable

from oppo_platform.alerts.policy import STALL_PACES, Condition, RewardMemory, Rule

Sentence = Callable[[float, Rule], str]  # from the value and the rule that it violates

TITLES = {
    Condition.FAILED: "Failed",
    Condition.NODE_FAILED: "Node failed",
    Condition.FINISHED: "Finished",
    Condition.NOT_FINITE: "Not finite",
    Condition.STALLED: "Stalled",
    Condition.REWARD_COLLAPSED: "Reward collapsed",
    Condition.KL_ABOVE: "KL above",
    Condition.BUBBLE_ABOVE: "Bubble above",
}
MEANINGS = {
    Condition.FAILED: "The run ended with an error.",
    Condition.NODE_FAILED: "The run's node ended an attempt: a full disk, or its worker was killed. The run is retried.",
    Condition.FINISHED: "The run finished: all steps done, or a budget limit reached.",
    Condition.NOT_FINITE: "A loss, gradient, reward or KL was NaN or infinite, or a step was skipped because of it.",
    Condition.STALLED: f"No step for this many minutes and for {STALL_PACES:g} typical step times.",
    Condition.REWARD_COLLAPSED: "The smoothed reward lost more than this share of its gain from start to best.",
    Condition.KL_ABOVE: "KL to the reference per sequence, mean over the window.",
    Condition.BUBBLE_ABOVE: "Idle share of the run's devices, mean over the window.",
}


def format_duration(seconds: float) -> str:
    """Seconds as `50 s`, `12 m` or `2 h 5 m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m"
    return f"{whole // 3600} h {whole % 3600 // 60} m"


def why_stalled(silent_s: float, step: int, pace_s: float | None) -> str:
    """The reason of a `stalled` alert."""
    pace = f"; typical step time {pace_s:.3g} s" if pace_s is not None else ""
    missing = f"No step after step {step}" if step else "No first step"
    return f"{missing} for {format_duration(silent_s)}{pace}."


def why_kl(value: float, rule: Rule) -> str:
    """The reason of a `kl_above` alert."""
    steps = f"mean of the last {rule.window_steps} steps"
    return f"KL to the reference: {value:.4g} nats per sequence, {steps}; above {rule.threshold:g}."


def why_bubble(value: float, rule: Rule) -> str:
    """The reason of a `bubble_above` alert."""
    limit = 100 * (rule.threshold or 0.0)
    return f"Devices were idle for {100 * value:.3g} % of the last {rule.window_steps} steps; above {limit:g} %."


def why_collapsed(memory: RewardMemory, share: float) -> str:
    """The reason of a `reward_collapsed` alert."""
    best, start = memory.best or 0.0, memory.start or 0.0
    return (
        f"The smoothed reward fell from its best, {best:.4g}, to {memory.level:.4g}: "
        f"{100 * share:.0f} % of its gain since {start:.4g}."
    )
