"""Text mixed into the actor's update, against forgetting (PPO-ptx, arXiv 2203.02155 §3.5).

Each PPO step adds coefficient × mean next-token loss of its texts to the policy loss. Which texts is a function of (seed, step),
so there is no cursor to save. The loss is the plain one of language modelling: the sampling temperature does not enter.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oppo_contract.sections.training import PLAIN_TRAINING
from oppo_contract.spec import Pretraining, Training
from oppo_core.distributed.process_group import ALONE, Ranks
from oppo_core.models.protocol import Network
from oppo_core.ppo.deferred_metrics import Figures
from oppo_core.ppo.logprobs import next_token_loss, told_tokens
from oppo_core.ppo.microbatching import packed_batches, ragged_batches, response_states
from oppo_core.ppo.oom_retry import PassBudget
from oppo_core.rng import Use, generator
from oppo_core.rollout.prompts import PromptError, rows_in
from oppo_core.rollout.tokenizer import TextCodec
from oppo_core.training.protocol import TrainingBackend


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

    def __init__(
        self,
        texts: list[NDArray[np.int64]],
        settings: Pretraining,
        seed: int,
        budget: PassBudget,
        training: Training = PLAIN_TRAINING,
    ) -> None:
        """`budget`: the actor's, of one forward and backward pass; `training`: what a pass keeps."""
        self.texts = texts
        self.settings = settings
        self.seed = seed
        self.budget = budget
        self.training = training

    def of_step(self, step: int) -> list[NDArray[np.int64]]:
        """The texts of PPO step `step`: the next ones of an endless stream that visits each once an epoch."""
        wanted = range(step * self.settings.sequences, (step + 1) * self.settings.sequences)
        epochs = {number // len(self.texts) for number in wanted}
        orders = {epoch: self._order(epoch) for epoch in epochs}
        return [self.texts[orders[number // len(self.texts)][number % len(self.texts)]] for number in wanted]

    def passes(self, step: int, share: int, shares: int, ranks: Ranks = ALONE) -> int:
        """Backward passes that `add_gradient` makes for these arguments."""
        return len(self._cut(self.of_step(step)[share::shares][ranks.rank :: ranks.world]))

    def add_gradient(
        self, network: Network, backend: TrainingBackend, step: int, share: int, shares: int, ranks: Ranks = ALONE
    ) -> tuple[float, int]:
        """Gradient of the `share`-th of `shares` parts of the step's texts; returns the summed loss and its tokens.

        Each of the `ranks` takes its texts of the part.

        Raises:
            NonFiniteError: the loss is NaN or infinite.
        """
        texts = self.of_step(step)[share::shares]
        total, figures = sum(len(ids) - 1 for ids in texts), Figures()
        texts = texts[ranks.rank :: ranks.world]
        for rows in self._cut(texts):
            chosen = [texts[row] for row in rows]
            (loss,) = backend.forward(partial(_loss, texts=chosen, training=self.training), network)
            backend.backward(self.settings.coefficient * loss / total)
            figures.note(loss)
        summed = 0.0
        for (told,) in figures.read():
            if not math.isfinite(told):
                backend.fault(f"the pretraining loss is {told} at step {step + 1}; look at the texts")
            summed += told
        return summed, sum(len(ids) - 1 for ids in texts)

    def _cut(self, texts: list[NDArray[np.int64]]) -> list[list[int]]:
        lengths = [len(ids) for ids in texts]
        cut = packed_batches if self.training.packs else ragged_batches
        return cut(lengths, self.budget.tokens)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        order = np.arange(len(self.texts))
        generator(self.seed, Use.PRETRAINING, epoch).shuffle(order)
        return order


def _loss(network: Network, texts: list[NDArray[np.int64]], training: Training) -> tuple[Tensor]:
    """Summed next-token loss of some texts."""
    first = [1] * len(texts)
    states = response_states(network, texts, first, training.packs)
    return (next_token_loss(network, states, told_tokens(texts, first, states), training.recompute != "off"),)
