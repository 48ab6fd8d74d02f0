"""The actor's side of a PPO step: proximal log-probs before, clipped policy loss after."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from oppo_contract.spec import Ppo
from oppo_core.models.folder import export_model, restore_weights, save_weights
from oppo_core.models.protocol import Network
from oppo_core.ppo.batches import mini_batch_rows, ragged_batches, response_states
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.math import kl_estimate, policy_loss
from oppo_core.ppo.optimizer import NonFiniteError, Optimizer

WEIGHTS, MOMENTS = "actor", "actor-optimizer.safetensors"


@dataclass(slots=True)
class TokenSums:
    """Sums over the tokens of one update, divided once at the end."""

    tokens: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    log_ratio: float = 0.0
    entropy: float = 0.0


class Acting(Protocol):
    """What the training loop asks of the actor's trainer, real or simulated."""

    def logprobs(self, tokens: list[NDArray[np.int64]], prompt_lengths: list[int]) -> list[Tensor]:
        """Log-prob of each response token under the present weights, a tensor a sequence."""

    def update(self, experience: Experience, step: int, kl_coefficient: float) -> dict[str, float]:
        """Train on the batch of PPO step `step` (from 0); returns `actor/*` metrics."""

    def save(self, folder: Path, source: Path | None, eos: int, pad: int) -> None:
        """Write the actor as a model folder with the tokenizer of `source`, and the optimizer's state, into `folder`."""

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote."""


class ActorTrainer:
    """Trains the policy network on an `Experience`."""

    def __init__(self, network: Network, ppo: Ppo, temperature: float, seed: int) -> None:
        self.network = network
        self.ppo = ppo
        self.temperature = temperature
        self.seed = seed
        self.optimizer = Optimizer(network.parameters(), ppo.learning_rate, ppo.weight_decay, ppo.warmup_steps, ppo.max_grad_norm)

    def save(self, folder: Path, source: Path | None, eos: int, pad: int) -> None:
        """See `Acting.save`."""
        export_model(self.network, folder / WEIGHTS, source, eos, pad)
        save_weights(self.optimizer.state(), folder / MOMENTS)

    def load(self, folder: Path) -> None:
        """See `Acting.load`."""
        restore_weights(self.network, folder / WEIGHTS)
        self.optimizer.load_state(load_file(folder / MOMENTS))

    @torch.no_grad()
    def logprobs(self, tokens: list[NDArray[np.int64]], prompt_lengths: list[int]) -> list[Tensor]:
        """Log-prob of each response token under the present weights, a tensor a sequence."""
        result: list[Tensor] = [torch.empty(0)] * len(tokens)
        for rows in ragged_batches([len(ids) for ids in tokens], self.ppo.micro_batch_tokens):
            logp, _ = self._forward([tokens[r] for r in rows], [prompt_lengths[r] for r in rows])
            sizes = [len(tokens[r]) - prompt_lengths[r] for r in rows]
            for row, part in zip(rows, torch.split(logp, sizes), strict=True):
                result[row] = part
        return result

    def update(self, experience: Experience, step: int, kl_coefficient: float) -> dict[str, float]:
        """All epochs and mini-batches of PPO step `step` (from 0); returns `actor/*` metrics.

        Raises:
            NonFiniteError: the loss or its gradient is NaN or infinite.
        """
        sums, norms = TokenSums(), []
        for epoch in range(self.ppo.epochs):
            for rows in mini_batch_rows(len(experience.tokens), self.ppo.mini_batches, self.seed, step, epoch):
                self._accumulate(experience, rows, kl_coefficient, sums)
                norms.append(self.optimizer.apply(step, "actor"))
        return {
            "actor/pg_loss": sums.loss / sums.tokens,
            "actor/pg_clipfrac": sums.clipped / sums.tokens,
            "actor/ppo_kl": -sums.log_ratio / sums.tokens,
            "actor/entropy": sums.entropy / sums.tokens,
            "actor/grad_norm": float(np.mean(norms)),
            "actor/lr": self.optimizer.rate(step),
        }

    def _accumulate(self, experience: Experience, rows: list[int], kl_coefficient: float, sums: TokenSums) -> None:
        """Gradients of one mini-batch: the mean over its response tokens, however it is cut into micro-batches."""
        total = int(experience.mask[rows].sum())
        self.optimizer.zero_grad()
        lengths = [len(experience.tokens[r]) for r in rows]
        for group in ragged_batches(lengths, self.ppo.micro_batch_tokens):
            loss = self._loss([rows[i] for i in group], experience, kl_coefficient, sums) / total
            if not torch.isfinite(loss):
                raise NonFiniteError(
                    f"the policy loss is {float(loss.detach())}; look at critic/score/* and objective/kl of the steps before"
                )
            loss.backward()  # type: ignore[no-untyped-call]
        sums.tokens += total

    def _loss(self, rows: list[int], experience: Experience, kl_coefficient: float, sums: TokenSums) -> Tensor:
        mask = experience.mask[rows]
        logp, entropy = self._forward([experience.tokens[r] for r in rows], [experience.prompt_lengths[r] for r in rows])
        proximal, advantages, weights = (
            field[rows][mask].to(logp.dtype) for field in (experience.proximal_logp, experience.advantages, experience.weights)
        )
        losses, clipped = policy_loss(logp, proximal, advantages, weights, self.ppo.clip_range, self.ppo.dual_clip)
        loss = losses.sum()
        if self.ppo.entropy_coefficient:
            loss = loss - self.ppo.entropy_coefficient * entropy.sum()
        if self.ppo.kl.placement == "loss":
            reference = experience.reference_logp[rows][mask].to(logp.dtype)
            loss = loss + kl_coefficient * kl_estimate(logp, reference, self.ppo.kl.estimator).sum()
        sums.loss += float(losses.detach().sum())
        sums.clipped += float(clipped.sum())
        sums.log_ratio += float((logp.detach() - proximal).sum())
        sums.entropy += float(entropy.detach().sum())
        return loss

    def _forward(self, tokens: list[NDArray[np.int64]], prompt_lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [M] of the response tokens, rows one after the other."""
        logits = self.network.logits(response_states(self.network, tokens, prompt_lengths)) / self.temperature
        logp_MV = torch.log_softmax(logits, dim=-1)
        told = torch.from_numpy(np.concatenate([ids[p:] for ids, p in zip(tokens, prompt_lengths, strict=True)]))
        entropy = -(logp_MV.exp() * logp_MV).sum(-1) if self.ppo.entropy_coefficient else _entropy(logp_MV)
        return logp_MV.gather(-1, told[:, None]).squeeze(-1), entropy


@torch.no_grad()
def _entropy(logp_MV: Tensor) -> Tensor:
    return -(logp_MV.exp() * logp_MV).sum(-1)
