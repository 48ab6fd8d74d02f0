"""The policy's objective: clipped loss, its aggregation, entropy bonus and KL penalty (docs/algorithm.md, "One step")."""

from __future__ import annotations

import torch
from torch import Tensor

from oppo_contract.spec import Ppo
from oppo_core.models.host_device import to_device
from oppo_core.ppo.deferred_metrics import DeferredMetrics
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.losses import kl_estimate, policy_loss


class PolicyObjective:
    """Losses of response tokens of some rows of an `Experience`; M is the number of these tokens."""

    def __init__(self, ppo: Ppo, max_new_tokens: int) -> None:
        """`max_new_tokens`: divisor of `loss_aggregation: token_sum`."""
        self.ppo = ppo
        self.max_new_tokens = max_new_tokens

    def loss(
        self,
        rows: list[int],
        experience: Experience,
        logp: Tensor,
        entropy: Tensor,
        kl_coefficient: float,
        metrics: DeferredMetrics,
    ) -> Tensor:
        """Summed loss of some rows; records it and the arguments of `TokenSums.add` in `metrics`."""
        losses, clipped = self.policy_losses(rows, experience, logp, experience.advantages)
        scale = self._scale(rows, experience, logp)
        regularization = self.regularization(rows, experience, logp, entropy, kl_coefficient)
        loss = (scale * (losses if regularization is None else losses + regularization)).sum()
        proximal = _tokens_of(experience.proximal_logp, rows, experience.mask, logp)
        metrics.record(loss, (scale * losses).sum(), clipped.sum(), (logp.detach() - proximal).sum(), entropy.sum())
        return loss

    def _scale(self, rows: list[int], experience: Experience, like: Tensor) -> Tensor:
        """Factor [M] of each token's loss; their sum is divided by the mini-batch's tokens or responses
        (`ppo.loss_aggregation`).
        """
        lengths = experience.mask.sum(-1, keepdim=True).double()
        scale = {
            "token_mean": torch.ones_like(lengths),
            "sequence_mean": 1 / lengths,
            "token_sum": torch.full_like(lengths, 1 / self.max_new_tokens),
        }[self.ppo.loss_aggregation]
        return _tokens_of(scale.expand_as(experience.mask), rows, experience.mask, like)

    def policy_losses(
        self, rows: list[int], experience: Experience, logp: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Policy loss per response token of some rows, and the mask of clipped tokens. `advantages`: of all rows."""
        proximal, advantages, weights = (
            _tokens_of(column, rows, experience.mask, logp)
            for column in (experience.proximal_logp, advantages, experience.weights)
        )
        low, high = self.ppo.clip_range, self.ppo.clip_range_high
        return policy_loss(logp, proximal, advantages, weights, (low, low if high is None else high), self.ppo.dual_clip)

    def regularization(
        self, rows: list[int], experience: Experience, logp: Tensor, entropy: Tensor, kl_coefficient: float
    ) -> Tensor | None:
        """Loss terms [M] without advantages: entropy bonus and KL penalty. None if there are none.

        The KL term estimates an expectation over tokens that the present policy samples, so stale tokens have their importance
        weight. The entropy of a position is exact whatever token was sampled there, so it has none.
        """
        terms = []
        if self.ppo.entropy_coefficient:
            terms.append(-self.ppo.entropy_coefficient * entropy)
        if self.ppo.kl.placement == "loss":
            reference, weights = (
                _tokens_of(column, rows, experience.mask, logp) for column in (experience.reference_logp, experience.weights)
            )
            terms.append(kl_coefficient * weights * kl_estimate(logp, reference, self.ppo.kl.estimator))
        return torch.stack(terms).sum(0) if terms else None


def _tokens_of(column: Tensor, rows: list[int], mask: Tensor, like: Tensor) -> Tensor:
    """Values [M] of a column at the response tokens of some rows, with the device and dtype of `like`."""
    return to_device(column[rows][mask[rows]], like.device).to(like)
