"""Pretraining texts mixed into the actor's update against forgetting (PPO-ptx, arXiv 2203.02155 §3.5).

Each PPO step adds coefficient × mean next-token loss of its texts to the policy loss. The texts are a function of (seed, step),
so there is no cursor to save. The loss is the plain language-modelling loss, without sampling temperature.
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
from oppo_core.distributed.process_group import SINGLE, Ranks
from oppo_core.models.microbatching import packed_batches, ragged_batches, response_states
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network
from oppo_core.ppo.deferred_metrics import DeferredMetrics
from oppo_core.ppo.logprobs import next_token_loss, response_tokens
from oppo_core.rng import Use, generator
from oppo_core.rollout.prompts import PromptError, iter_rows
from oppo_core.rollout.tokenizer import TextCodec
from oppo_core.training.protocol import TrainingBackend


def read_texts(path: Path, key: str, codec: TextCodec, longest: int) -> list[NDArray[np.int64]]:
    """Read the texts of a JSON Lines file as token ids, truncated to `longest`; texts of one token are dropped.

    Raises:
        PromptError: invalid JSON, a missing key, a token outside the vocabulary, or no text of two tokens.
    """
    texts = [ids[:longest] for ids, _ in iter_rows(path, key, "ppo.pretraining.field", codec)]
    texts = [ids for ids in texts if len(ids) > 1]
    if not texts:
        raise PromptError(f"{path.name} holds no text of two tokens or more")
    return texts


class PretrainingMix:
    """Adds the gradients of pretraining texts to those of the policy loss."""

    def __init__(
        self,
        texts: list[NDArray[np.int64]],
        settings: Pretraining,
        seed: int,
        budget: PassBudget,
        training: Training = PLAIN_TRAINING,
    ) -> None:
        """`budget`: the actor's; `training`: checkpointing and packing of passes."""
        self.texts = texts
        self.settings = settings
        self.seed = seed
        self.budget = budget
        self.training = training

    def texts_at(self, step: int) -> list[NDArray[np.int64]]:
        """Texts of PPO step `step`, from an endless stream that visits each text once per epoch."""
        numbers = range(step * self.settings.sequences, (step + 1) * self.settings.sequences)
        epochs = {number // len(self.texts) for number in numbers}
        orders = {epoch: self._order(epoch) for epoch in epochs}
        return [self.texts[orders[number // len(self.texts)][number % len(self.texts)]] for number in numbers]

    def passes(self, step: int, share: int, shares: int, ranks: Ranks = SINGLE) -> int:
        """Number of backward passes in `add_gradient` for these arguments."""
        return len(self._micro_batches(self.texts_at(step)[share::shares][ranks.rank :: ranks.world]))

    def add_gradient(
        self, network: Network, backend: TrainingBackend, step: int, share: int, shares: int, ranks: Ranks = SINGLE
    ) -> tuple[float, int]:
        """Add the gradient of part `share` of `shares` of the step's texts; returns this rank's summed loss and tokens.

        Each of the `ranks` takes its share of the part.

        Raises:
            NonFiniteError: the loss is NaN or infinite.
        """
        texts = self.texts_at(step)[share::shares]
        total, metrics = sum(len(ids) - 1 for ids in texts), DeferredMetrics()
        texts = texts[ranks.rank :: ranks.world]
        for rows in self._micro_batches(texts):
            chosen = [texts[row] for row in rows]
            (loss,) = backend.forward(partial(_loss, texts=chosen, training=self.training), network)
            backend.backward(self.settings.coefficient * loss / total)
            metrics.record(loss)
        summed = 0.0
        for (text_loss,) in metrics.read():
            if not math.isfinite(text_loss):
                backend.fault(f"the pretraining loss is {text_loss} at step {step + 1}; look at the texts")
            summed += text_loss
        return summed, sum(len(ids) - 1 for ids in texts)

    def _micro_batches(self, texts: list[NDArray[np.int64]]) -> list[list[int]]:
        lengths = [len(ids) for ids in texts]
        split = packed_batches if self.training.packs else ragged_batches
        return split(lengths, self.budget.tokens)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        order = np.arange(len(self.texts))
        generator(self.seed, Use.PRETRAINING, epoch).shuffle(order)
        return order


def _loss(network: Network, texts: list[NDArray[np.int64]], training: Training) -> tuple[Tensor]:
    """Summed next-token loss of some texts."""
    first = [1] * len(texts)
    states = response_states(network, texts, first, training.packs)
    return (next_token_loss(network, states, response_tokens(texts, first, states), training.recompute != "off"),)
