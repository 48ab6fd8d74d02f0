"""When a run ends: all steps done, a target reward, a KL limit, a time budget."""

from __future__ import annotations

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
    if budget.max_kl is not None and scores.kl > budget.max_kl:
        return f"the mean KL to the reference, {scores.kl:.4g} nats a sequence, is above budget.max_kl, {budget.max_kl:g}"
    if budget.max_hours is not None and elapsed_s > budget.max_hours * 3600:
        return f"the time budget of {budget.max_hours:g} h is used up"
    return None
