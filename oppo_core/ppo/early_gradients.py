"""Actor gradients of answers trained before the batch is complete (docs/algorithm.md, "Update overlap").

Before the first optimizer step every ratio is 1, so the policy loss is linear in the advantages. Whitening gives advantages
A = (A_raw − μ)·σ, and μ and σ need the whole batch. So the gradients of the losses with A = A_raw and with A = 1 are summed
separately and combined when μ and σ are known.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_core.ppo.actor import ActorTrainer, EarlyPart
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.retained_forward import RetainedForward


@dataclass(frozen=True, slots=True)
class EarlyGradients:
    """Gradient sums over early rows, one tensor per trained parameter, in shared memory: one process adds, the other combines.

    `raw`: policy loss with raw advantages; `ones`: with advantages of 1 (empty without whitening); `regularization`: terms
    without advantages (empty if there are none). `metrics`: the two losses and the entropy.
    """

    raw: list[Tensor]
    ones: list[Tensor]
    regularization: list[Tensor]
    metrics: Tensor

    @classmethod
    def shared(cls, trainer: ActorTrainer) -> EarlyGradients:
        """Zeros for a trainer's parameters, in shared memory."""
        parameters, ppo = trainer.optimizer.parameters, trainer.ppo

        def zeros(needed: bool) -> list[Tensor]:
            return [torch.zeros_like(p, requires_grad=False).share_memory_() for p in parameters] if needed else []  # type: ignore[no-untyped-call]

        metrics = torch.zeros(3, dtype=torch.float64).share_memory_()  # type: ignore[no-untyped-call]
        return cls(zeros(True), zeros(ppo.whiten_advantages), zeros(ppo.is_regularized), metrics)

    def add(self, trainer: ActorTrainer, experience: Experience, forward: RetainedForward, kl_coefficient: float) -> None:
        """Add the gradients of an experience's rows; `forward` is the trainer's forward pass over them."""
        ones = torch.ones_like(experience.raw_advantages)
        parameters = trainer.optimizer.parameters
        for rows, (logp, entropy) in forward.groups():
            losses = [
                (self.raw, trainer.objective.policy_losses(rows, experience, logp, experience.raw_advantages)[0].sum()),
                (self.ones, trainer.objective.policy_losses(rows, experience, logp, ones)[0].sum()),
            ]
            metrics = [*(loss for _, loss in losses), entropy.sum()]
            self.metrics.add_(torch.stack([metric.detach().double() for metric in metrics]))
            regularization = trainer.objective.regularization(rows, experience, logp, entropy, kl_coefficient)
            summed = None if regularization is None else regularization.sum()
            candidates = (*losses, (self.regularization, summed))
            terms = [(sums, loss) for sums, loss in candidates if sums and loss is not None]
            for number, (sums, loss) in enumerate(terms, start=1):
                gradients = torch.autograd.grad(loss, parameters, retain_graph=number < len(terms))
                torch._foreach_add_(sums, list(gradients))

    def combine(self, rows: Rows[int], mean: float, scale: float, tokens: int) -> EarlyPart:
        """Early results for `rows` of a batch of `tokens` tokens; resets the sums to zero.

        `mean` and `scale`: whitening of the batch's advantages; 0 and 1 without whitening.
        """
        gradients = []
        for number, raw in enumerate(self.raw):
            gradient = raw - mean * self.ones[number] if self.ones else raw.clone()
            gradient *= scale
            if self.regularization:
                gradient += self.regularization[number]
            gradients.append(gradient.div_(tokens))
        raw_loss, ones_loss, entropy = self.metrics.tolist()
        for sums in (*self.raw, *self.ones, *self.regularization, self.metrics):
            sums.zero_()
        return EarlyPart(frozenset(rows), gradients, scale * (raw_loss - mean * ones_loss), entropy)
