"""Scorers whose networks are sharded over the ranks (`training.backend: fsdp2`).

Passes over a sharded network are collective, so reference, critic and reward models read when the batch is complete, in the
trainer's thread: every rank makes the same passes in the same order. With a service or vLLM, rewards are streamed as usual, by
the rank that decodes a response. It may be trained by another rank, so the ranks exchange those scores.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.distributed.process_group import Ranks
from oppo_core.models.microbatching import ONE_TOKEN, pass_costs, response_states
from oppo_core.models.protocol import Network
from oppo_core.ppo.critic import CriticTrainer
from oppo_core.ppo.logprobs import response_tokens, sliced_logprobs
from oppo_core.ppo.retained_forward import RetainedForward
from oppo_core.ppo.scored import Scored
from oppo_core.rewards.composite import Rewards
from oppo_core.rollout.sampling_support import concat_supports
from oppo_core.rollout.sequence import Support
from oppo_core.scoring.scored_sequence import ScoredSequence
from oppo_core.scoring.scorers import Networks, Rewarded, SequenceDelta
from oppo_core.scoring.single_pass import SinglePassScorers
from oppo_core.trace.recorder import Recorder
from oppo_core.training.sharded_module import ShardedModule


class ShardedScorers(SinglePassScorers):
    """A `ScorerProtocol` whose `start_…` and `wait_…` methods are collective: every rank must call them."""

    def __init__(
        self, reference: ShardedModule, rewards: Rewards, trainer: CriticTrainer | None, pass_tokens: int, temperature: float,
        trace: Recorder, ranks: Ranks, streams: bool, packs: bool,
    ) -> None:  # fmt: skip
        """`streams`: responses are sent while the actor decodes, before rows are moved between the ranks."""
        super().__init__(Networks(None, None, rewards), trainer, 0, 0, pass_tokens, temperature, trace)
        self._module, self._ranks, self._streams, self._packs = reference, ranks, streams, packs
        self.reads.may_shrink = False  # other ranks count on this one's passes
        self._pending: tuple[list[int], list[NDArray[np.float64]]] = ([], [])  # sequence_ids to collect, and their values
        self._arrived: set[int] = set()  # rows that other ranks have decoded, and score

    def extend(self, deltas: list[SequenceDelta], chunk: int) -> None:
        """Receive new tokens. With streaming, those of chunk 0 are rows that other ranks have decoded."""
        if self._streams and not chunk:
            self._append(deltas)
            self._arrived |= {delta.sequence_id for delta in deltas}
        else:
            super().extend(deltas, chunk)

    def start_collect(self, sequence_ids: list[int]) -> None:
        self._read_reference_rows([row for i in sequence_ids if not (row := self.sequences[i]).reference_logprobs])
        values = [np.empty(0)] * len(sequence_ids) if self.trainer is None else self._values(sequence_ids)
        self._pending = sequence_ids, values
        with self.trace.span("reward", "reward-prefill", rows=len(sequence_ids)):
            self.reward.read_together(self.alive)

    def wait_collect(self) -> dict[int, Scored]:
        sequence_ids, values = self._pending
        rewards = self._exchange_rewards(sequence_ids)
        with self.trace.span("reward", "score", rows=len(sequence_ids)):
            return self._scored(sequence_ids, values, rewards)

    def _read_reference_rows(self, rows: list[ScoredSequence]) -> None:
        """Reference log-probs of the response tokens of whole rows. Collective."""

        def compute(chosen: list[int]) -> tuple[Tensor]:
            tokens, prompts = [rows[r].tokens for r in chosen], [rows[r].prompt_length for r in chosen]
            support = concat_supports(rows[r].support for r in chosen)
            return self._module.run(partial(_logprobs, tokens, prompts, support, self.temperature, self._packs))

        def reads(passes: int) -> AbstractContextManager[None]:
            return self._module.reads(passes, partial(_logprobs, *ONE_TOKEN, [], self.temperature, self._packs))

        lengths = [len(row.tokens) for row in rows]
        sizes = [length - row.prompt_length for length, row in zip(lengths, rows, strict=True)]
        costs = pass_costs(self._module.network)
        forward = RetainedForward(compute, lengths, sizes, self.reads.tokens, 0, costs, self._packs, reads)
        with self.trace.span("reference", "reference-prefill", rows=len(rows)):
            read = self.reads.run("the reference's reading", lambda: forward.first)
        for row, logprobs in zip(rows, read, strict=True):
            row.reference_logprobs = [logprobs]

    def _exchange_rewards(self, sequence_ids: list[int]) -> dict[int, Rewarded]:
        """Rewards of `sequence_ids`, of which other ranks have scored some; drops the rows that other ranks train. Collective."""
        if not self._streams:
            return self._rewards(sequence_ids)
        wanted = [set(json.loads(ids)) for ids in self._ranks.all_gather(json.dumps(sequence_ids).encode())]
        others = set[int]().union(*wanted[: self._ranks.rank], *wanted[self._ranks.rank + 1 :])
        left, own = [i for i in self.sequences if i in others], [i for i in sequence_ids if i not in self._arrived]
        rewards = self._rewards([*own, *left])
        sent = json.dumps([[i, *rewards.pop(i)] for i in left]).encode()
        for i, parts, cached in (row for received in self._ranks.all_gather(sent) for row in json.loads(received)):
            if i in self._arrived:
                rewards[i] = tuple(parts), tuple(cached)
        for i in left:
            self._drop(i)
        return rewards

    def release(self, sequence_ids: list[int]) -> None:
        super().release(sequence_ids)
        self._arrived -= set(sequence_ids)

    def start_save(self, folder: str) -> None:
        super().start_save(folder)
        self._arrived = set()


def _logprobs(
    tokens: list[NDArray[np.int64]], prompts: list[int], support: Support, temperature: float, packs: bool, network: Network
) -> tuple[Tensor]:
    """Log-probs [M] of the response tokens of some rows."""
    states = response_states(network, tokens, prompts, packs)
    return (sliced_logprobs(network, states, response_tokens(tokens, prompts, states), support, temperature),)
