"""Text mixed into the actor's update, against forgetting (PPO-ptx, arXiv 2203.02155 §3.5).

Each PPO step adds coefficient × mean next-token loss of its texts to the policy loss. Which texts is a function of (seed, step),
so there is no cursor to save. The loss is the plain one of language modelling: the sampling temperature does not enter.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from oppo_contract.spec import Pretraining
from oppo_core.models.precision import precise
from oppo_core.models.protocol import Network
from oppo_core.ppo.batches import ragged_batches, response_states
from oppo_core.ppo.optimizer import NonFiniteError
from oppo_core.randomness import Use, generator
from oppo_core.ranks import ALONE, Ranks
from oppo_core.rollout.prompts import PromptError, rows_in
from oppo_core.rollout.tokens import TextCodec


def read_texts(path: Path, key: str, codec: TextCodec, longest: int) -> list[NDArray[np.int64]]:
    """The texts of a JSON Lines file as token ids, cut at `longest`; a text of one token, which predicts nothing, is left out.

    Raises:
        PromptError: broken JSON, a missing key, a token outside the vocabulary, or no text of two tokens.
    """
    texts = [ids[:longest] for ids, _ in rows_in(path, key, "ppo.pretraining.field", codec)]
    texts = [ids for ids in texts if len(ids) > 1]
    if not texts:
        raise PromptError(f"{path.name} holds no text of two tokens or more")
    return texts


class PretrainingMix:
    """Adds the gradients of some texts to those of the policy loss."""

    def __init__(self, texts: list[NDArray[np.int64]], settings: Pretraining, seed: int, budget: int) -> None:
        """`budget`: most padded tokens in one forward and backward pass."""
        self.texts = texts
        self.settings = settings
        self.seed = seed
        self.budget = budget

    def of_step(self, step: int) -> list[NDArray[np.int64]]:
        """The texts of PPO step `step`: the next ones of an endless stream that visits each once an epoch."""
        wanted = range(step * self.settings.sequences, (step + 1) * self.settings.sequences)
        epochs = {number // len(self.texts) for number in wanted}
        orders = {epoch: self._order(epoch) for epoch in epochs}
        return [self.texts[orders[number // len(self.texts)][number % len(self.texts)]] for number in wanted]

    def add_gradient(self, network: Network, step: int, share: int, shares: int, ranks: Ranks = ALONE) -> tuple[float, int]:
        """Gradient of the `share`-th of `shares` parts of the step's texts; returns the summed loss and its tokens.

        Each of the `ranks` takes its texts of the part.

        Raises:
            NonFiniteError: the loss is NaN or infinite.
        """
        texts = self.of_step(step)[share::shares]
        total, summed = sum(len(ids) - 1 for ids in texts), 0.0
        texts = texts[ranks.rank :: ranks.world]
        for rows in ragged_batches([len(ids) for ids in texts], self.budget):
            chosen = [texts[row] for row in rows]
            logits = precise(network.logits(response_states(network, chosen, [1] * len(chosen))))
            told = torch.from_numpy(np.concatenate([ids[1:] for ids in chosen])).to(logits.device)
            loss = torch.nn.functional.cross_entropy(logits, told, reduction="sum")
            if not torch.isfinite(loss):
                raise NonFiniteError(f"the pretraining loss is {float(loss.detach())} at step {step + 1}; look at the texts")
            (self.settings.coefficient * loss / total).backward()  # type: ignore[no-untyped-call]
            summed += float(loss.detach())
        return summed, sum(len(ids) - 1 for ids in texts)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        order = np.arange(len(self.texts))
        generator(self.seed, Use.PRETRAINING, epoch).shuffle(order)
        return order
