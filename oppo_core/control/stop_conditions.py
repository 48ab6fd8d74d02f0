"""When a run ends: all steps done, a target reward, a collapse of the policy, a time budget."""

from __future__ import annotations

from oppo_contract.sections.run import Budget
from oppo_contract.spec import RunSpec
from oppo_core.control.run_score import RunScore

ASKED_TO_STOP = "asked to stop"
ALL_DONE = "all steps are done"


def reason_to_end(spec: RunSpec, step: int, elapsed_s: float, scores: RunScore) -> str | None:
    """Why no further step is trained; None if training continues.

    Args:
        step: PPO steps that are done.
        elapsed_s: training time so far, all attempts together.
    """
    budget = spec.budget
    if scores.unfinished:
        return ASKED_TO_STOP
    if step >= spec.steps:
        return ALL_DONE
    if budget.stop_at_target and budget.target_reward is not None:
        source, score = ("evaluation's ", scores.evaluation) if spec.evaluation is not None else ("", scores.score)
        if score is not None and score >= budget.target_reward:
            return f"the {source}mean score {score:.4g} has reached budget.target_reward, {budget.target_reward:g}"
    if (collapsed := reason_of_collapse(budget, scores)) is not None:
        return collapsed
    if budget.max_hours is not None and elapsed_s > budget.max_hours * 3600:
        return f"the time budget of {budget.max_hours:g} h is used up"
    return None


def reason_of_collapse(budget: Budget, scores: RunScore) -> str | None:
    """Which limit the last `budget.patience` steps were all beyond; None for none. A step without a value is within the limit."""
    last = scores.recent[-budget.patience :]
    if len(last) < budget.patience:
        return None
    kl, entropy, repetition = zip(*last, strict=True)
    long = "" if budget.patience == 1 else f", for {budget.patience} steps"
    if budget.max_kl is not None and all(value > budget.max_kl for value in kl):
        return f"the mean KL to the reference, {kl[-1]:.4g} nats a sequence, is above budget.max_kl, {budget.max_kl:g}{long}"
    if budget.min_entropy is not None and all(value < budget.min_entropy for value in entropy):
        return f"the mean entropy, {entropy[-1]:.4g} nats a token, is below budget.min_entropy, {budget.min_entropy:g}{long}"
    if budget.max_repetition is not None and all(value > budget.max_repetition for value in repetition):
        limit = f"budget.max_repetition, {budget.max_repetition:g}"
        return f"the mean share of repeated 4-grams, {repetition[-1]:.4g}, is above {limit}{long}"
    return None
