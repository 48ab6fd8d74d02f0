"""The actor's gradients of answers that are trained before the batch is complete (docs/algorithm.md, "Update overlap").

Before the first optimizer step every ratio is 1, so the policy loss is linear in the advantages. Whitening makes an advantage
A = (A_raw − μ)·σ, and μ and σ need the whole batch. So the gradients of the losses with A_raw and with 1 in the place of A are
summed apart, and combined when μ and σ are known.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_core.ppo.actor import ActorTrainer, EarlyPart
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.retained_forward import HeldForward


@dataclass(frozen=True, slots=True)
class EarlyGradients:
    """Sums over early rows, in the order of the trained parameters. Two processes may see them: one adds, the other combines.

    `raw`: of the policy loss with raw advantages; `ones`: with advantages of 1, empty where nothing is whitened; `rest`: of what
    does not depend on advantages, empty where there is nothing. `figures`: the two losses and the entropy.
    """

    raw: list[Tensor]
    ones: list[Tensor]
    rest: list[Tensor]
    figures: Tensor

    @classmethod
    def shared(cls, trainer: ActorTrainer) -> EarlyGradients:
        """Zeros for a trainer's parameters, in memory that other processes can see."""
        parameters, ppo = trainer.optimizer.parameters, trainer.ppo

        def zeros(wanted: bool) -> list[Tensor]:
            return [torch.zeros_like(p, requires_grad=False).share_memory_() for p in parameters] if wanted else []  # type: ignore[no-untyped-call]

        figures = torch.zeros(3, dtype=torch.float64).share_memory_()  # type: ignore[no-untyped-call]
        return cls(zeros(True), zeros(ppo.whiten_advantages), zeros(ppo.is_regularized), figures)

    def add(self, trainer: ActorTrainer, experience: Experience, forward: HeldForward, kl_coefficient: float) -> None:
        """Sum the gradients of an experience's rows, of which `forward` is the trainer's pass."""
        ones = torch.ones_like(experience.raw_advantages)
        parameters = trainer.optimizer.parameters
        for rows, (logp, entropy) in forward.groups():
            losses = [
                (self.raw, trainer.policy_losses(rows, experience, logp, experience.raw_advantages)[0].sum()),
                (self.ones, trainer.policy_losses(rows, experience, logp, ones)[0].sum()),
            ]
            figures = [*(loss for _, loss in losses), entropy.sum()]
            self.figures.add_(torch.stack([figure.detach().double() for figure in figures]))
            rest = trainer.regularization(rows, experience, logp, entropy, kl_coefficient)
            due = [(sums, loss) for sums, loss in (*losses, (self.rest, rest)) if sums and loss is not None]
            for number, (sums, loss) in enumerate(due, start=1):
                gradients = torch.autograd.grad(loss, parameters, retain_graph=number < len(due))
                torch._foreach_add_(sums, list(gradients))

    def combine(self, rows: Rows[int], mean: float, scale: float, tokens: int) -> EarlyPart:
        """What was added, for rows `rows` of a batch with so many tokens; then everything is zero again.

        `mean` and `scale`: of the batch's advantages as they are whitened; 0 and 1 where they are not.
        """
        gradients = []
        for number, raw in enumerate(self.raw):
            gradient = raw - mean * self.ones[number] if self.ones else raw.clone()
            gradient *= scale
            if self.rest:
                gradient += self.rest[number]
            gradients.append(gradient.div_(tokens))
        raw_loss, ones_loss, entropy = self.figures.tolist()
        for sums in (*self.raw, *self.ones, *self.rest, self.figures):
            sums.zero_()
        return EarlyPart(frozenset(rows), gradients, scale * (raw_loss - mean * ones_loss), entropy)
