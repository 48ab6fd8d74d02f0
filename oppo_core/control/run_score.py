"""The scores of a run that decide when it ends and which checkpoints are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan
from typing import NamedTuple

import numpy as np

from oppo_contract.sections.run import MAX_PATIENCE
from oppo_contract.spec import RunSpec

BY_EVALUATION = "the mean score of the evaluation at its step"
BY_TRAINING = "the mean score of the steps since the checkpoint before"


class Health(NamedTuple):
    """Means of a step that show a collapse; nan where a step has none.

    kl: to the reference, nats a sequence. entropy: of the policy, nats a token. repetition: share of repeated n-grams.
    """

    kl: float
    entropy: float
    repetition: float


@dataclass(slots=True)
class RunScore:
    """Scores of the newest step, of the newest evaluation, and of every checkpoint.

    Attributes:
        score, kl: mean score and KL (nats a sequence) of the last step.
        recent: `Health` of the last steps, at most `MAX_PATIENCE`, the newest last.
        means: mean scores of the steps since the last checkpoint.
        evaluated, evaluation: the policy version that was evaluated last, and its mean score.
        checkpoints: score by checkpoint folder name.
        pending_metrics: metrics of an evaluation that the next `step` event reports.
        last_metrics: all metrics of the present step's `step` event; empty before it is written.
        unfinished: a stop interrupted the evaluation of the present weights.
    """

    score: float = nan
    kl: float = nan
    recent: list[Health] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    evaluated: int = -1
    evaluation: float | None = None
    checkpoints: dict[str, float] = field(default_factory=dict)
    pending_metrics: dict[str, float] = field(default_factory=dict)
    last_metrics: dict[str, float] = field(default_factory=dict)
    unfinished: bool = False

    def __post_init__(self) -> None:
        self.recent = [Health(*values) for values in self.recent]  # lists in a checkpoint

    def add_step(self, score: float, health: Health) -> None:
        """Record a trained step."""
        self.score, self.kl = score, health.kl
        self.recent = [*self.recent, health][-MAX_PATIENCE:]
        self.means.append(score)

    def reset_evaluations(self) -> None:
        """Forget evaluation results that are not comparable with those to come, because the evaluation changed."""
        self.evaluated, self.evaluation, self.checkpoints = -1, None, {}

    def score_checkpoint(self, name: str, step: int, spec: RunSpec) -> float | None:
        """Record and return the score of a checkpoint written between two steps; None if it has none.

        If the spec asks for evaluations, only evaluated weights have a score.
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
    """How the score of a checkpoint is computed, in words."""
    return BY_EVALUATION if spec.evaluation is not None else BY_TRAINING
