"""How well a run does, as far as it decides when the run ends and which checkpoints are worth keeping."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING

import numpy as np

from oppo_contract.spec import RunSpec

if TYPE_CHECKING:
    from oppo_core.engine.build import Engine

ASKED_TO_STOP = "asked to stop"
ALL_DONE = "all steps are done"
BY_EVALUATION = "the mean score of the evaluation at its step"
BY_TRAINING = "the mean score of the steps since the checkpoint before"


@dataclass(slots=True)
class Standing:
    """`score` and `kl` (nats a sequence) of the last step; `means`: scores of the steps since the last checkpoint.

    `evaluated`: the policy version that was evaluated last, and what `evaluation` it got. `checkpoints`: the score of every
    checkpoint folder by name. `untold`: an evaluation's metrics, until the next step is told. `told`: all metrics of the present
    step, once they are told; empty where it told none. `unfinished`: a stop has cut off the evaluation of the present weights.
    """

    score: float = nan
    kl: float = nan
    means: list[float] = field(default_factory=list)
    evaluated: int = -1
    evaluation: float | None = None
    checkpoints: dict[str, float] = field(default_factory=dict)
    untold: dict[str, float] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)
    unfinished: bool = False

    def note(self, score: float, kl: float) -> None:
        """A step was trained."""
        self.score, self.kl = score, kl
        self.means.append(score)

    def forget_evaluations(self) -> None:
        """Evaluations are others from now on: what they gave so far cannot be compared."""
        self.evaluated, self.evaluation, self.checkpoints = -1, None, {}

    def judge(self, name: str, step: int, spec: RunSpec) -> float | None:
        """Give the checkpoint `name`, written between two steps, its score by `best_rule`; None where there is none.

        Where the spec asks for evaluations, weights that were not evaluated have no score: another step's would not be theirs.
        """
        if spec.evaluation is not None:
            score = self.evaluation if self.evaluated == step else None
        else:
            score = float(np.mean(self.means)) if self.means else None
        self.means = []
        if score is not None:
            self.checkpoints[name] = score
        return score


def best_rule(spec: RunSpec) -> str:
    """What a checkpoint's score is."""
    return BY_EVALUATION if spec.evaluation is not None else BY_TRAINING


def superfluous(names: list[str], present: str, scores: dict[str, float], keep: int, keep_best: int) -> list[str]:
    """Checkpoints to delete after `present` was written: neither among the `keep` newest nor the `keep_best` best.

    Names sort by age. What is newer than `present` belongs to another attempt's future and is left alone. Of equal scores the
    newer one is better; a score that is no number is worse than any.
    """
    past = sorted(name for name in names if name <= present)
    scored = [name for name in past if name in scores and scores[name] == scores[name]]
    best = sorted(scored, key=lambda name: (scores[name], name))[-keep_best:] if keep_best else []
    return [name for name in past[:-keep] if name not in best]


def reason_to_end(engine: Engine) -> str | None:
    """Why no further step is to be trained; None while there is no reason. The ranks' clocks differ: the first one's counts."""
    said = engine.ranks.gather((_reason_to_end(engine) or "").encode())[0]
    return said.decode() or None


def _reason_to_end(engine: Engine) -> str | None:
    spec, progress, standing = engine.spec, engine.progress, engine.standing
    budget = spec.budget
    if standing.unfinished:
        return ASKED_TO_STOP
    if progress.step >= spec.steps:
        return ALL_DONE
    if budget.stop_at_target and budget.target_reward is not None:
        said, score = ("evaluation's ", standing.evaluation) if spec.evaluation is not None else ("", standing.score)
        if score is not None and score >= budget.target_reward:
            return f"the {said}mean score {score:.4g} has reached budget.target_reward, {budget.target_reward:g}"
    if budget.max_kl is not None and standing.kl > budget.max_kl:
        return f"the mean KL to the reference, {standing.kl:.4g} nats a sequence, is above budget.max_kl, {budget.max_kl:g}"
    if budget.max_hours is not None and progress.elapsed_s > budget.max_hours * 3600:
        return f"the time budget of {budget.max_hours:g} h is used up"
    return None
