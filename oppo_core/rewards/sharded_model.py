"""A reward model whose weights are sharded over the ranks: all ranks read their finished answers together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.host_device import to_device
from oppo_core.models.microbatching import ONE_TOKEN, ragged_batches, right_padded
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network
from oppo_core.rewards.protocol import Answer
from oppo_core.rewards.text_model import Encode, TextModelReward
from oppo_core.training.sharded_module import ShardedModule


class ShardedModelReward(TextModelReward):
    """A `TextModelReward` that reads in `read_waiting`, because its passes are collective."""

    def __init__(self, module: ShardedModule, encode: Encode, pass_tokens: int) -> None:
        """`pass_tokens`: padded tokens per forward pass."""
        super().__init__(module.network, encode, PassBudget(pass_tokens, may_shrink=False, name="reads"))
        self._module = module
        self._waiting: dict[int, NDArray[np.int64]] = {}

    def start(self, answers: list[Answer], alive: Callable[[], None]) -> None:
        """Keep the answers for `read_waiting`. Raises RewardError as `TextModelReward` does."""
        for answer in answers:
            self.forget(answer.sequence_id)
            self._waiting[answer.sequence_id] = self._tokens(answer)

    @torch.no_grad()
    def read_waiting(self, alive: Callable[[], None]) -> None:
        """Score the answers that wait. Collective."""
        ids = sorted(self._waiting)
        groups = ragged_batches([len(self._waiting[i]) for i in ids], self.budget.tokens)
        with self._module.reads(len(groups), partial(_last_values, ONE_TOKEN[0])):
            for group in groups:
                read = partial(self._module.run, partial(_last_values, [self._waiting[ids[row]] for row in group]))
                (values,) = self.budget.run("the reward's reading", read)
                self._scores |= dict(zip((ids[row] for row in group), values.tolist(), strict=True))
                alive()
        self._waiting = {}

    def forget(self, sequence_id: int) -> None:
        super().forget(sequence_id)
        self._waiting.pop(sequence_id, None)


def _last_values(rows: list[NDArray[np.int64]], network: Network) -> tuple[Tensor]:
    """The head's values [N] at the last token of each row."""
    device = next(network.parameters()).device
    padded = to_device(right_padded(rows), device)
    hidden = network.hidden(padded, torch.arange(padded.shape[1], device=device).expand_as(padded))
    last = to_device([len(row) - 1 for row in rows], device)
    return (network.scalar(hidden[torch.arange(len(rows), device=device), last]),)
