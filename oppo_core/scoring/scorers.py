"""The three scorers over one set of sequences: one reward per answer, reference log-probs and values per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.host_device import on_host, to_device
from oppo_core.models.incremental_prefill import IncrementalPrefill, NewStates
from oppo_core.models.oom_retry import PassBudget, limit
from oppo_core.models.protocol import Network
from oppo_core.models.upcast import precise
from oppo_core.ppo.critic import CriticTrainer, CriticUpdate
from oppo_core.ppo.logprobs import sliced_logprobs
from oppo_core.ppo.retained_forward import RetainedForward
from oppo_core.ppo.scored import Scored
from oppo_core.ppo.stepwise import Pause, Stepwise
from oppo_core.rewards.composite import RewardReader, Rewards
from oppo_core.rollout.sampling_support import concat_supports
from oppo_core.rollout.sequence import Support
from oppo_core.scoring.scored_sequence import ScoredSequence
from oppo_core.trace.recorder import Recorder

# Hidden states that are copied together for the critic's head: 29 MB at width 3,584 in bfloat16.
HEAD_STATES = 4096


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """New tokens of one sequence, following those sent before; the first delta starts with the prompt.

    `support`: supports of the response tokens among them, with sampling filters. `stopped`: whether a stop condition ended
    the sequence.
    """

    sequence_id: int
    prompt_length: int
    tokens: NDArray[np.int64]
    finished: bool
    support: Support = field(default_factory=list)
    stopped: bool = False


class ScorerProtocol(Protocol):
    """Interface between the training loop and the scorers: in this process, a thread, a child process, or simulated.

    `start_…` returns at once if the scorers run concurrently; the `wait_…` of the same name returns its result. At most one
    `start_…` may wait for its `wait_…`.
    """

    saves_bytes: int  # approximate size of what `start_save` writes

    def begin(self, deltas: list[SequenceDelta]) -> None:
        """Start a step: receive new tokens and recompute the critic's KV cache under its new weights."""

    def extend(self, deltas: list[SequenceDelta], chunk: int) -> None:
        """Receive and prefill new tokens, in sequence_id order."""

    def start_collect(self, sequence_ids: list[int]) -> None:
        """Compute the scores of finished sequences."""

    def wait_collect(self) -> dict[int, Scored]:
        """Scores by sequence_id."""

    def forward_critic(self, sequence_ids: list[int]) -> None:
        """Start the forward pass of the critic's update on collected sequences, which needs no advantages; returns at once.

        Without effect where the update has several optimizer steps or its graphs cannot be retained.
        """

    def start_critic_update(self, update: CriticUpdate) -> None:
        """Train the critic on collected sequences and release them."""

    def wait_critic_update(self) -> dict[str, float]:
        """`critic/*` metrics."""

    def start_evaluate(self, deltas: list[SequenceDelta]) -> None:
        """Compute the reward of whole answers that belong to no batch; no state is kept."""

    def wait_evaluate(self) -> dict[int, float]:
        """The reward's weighted sum by sequence_id, before shaping."""

    def prepare_critic_update(self, update: CriticUpdate) -> None:
        """Prepare the update of `start_critic_update` step by step; the sequences are kept."""

    def start_critic_step(self) -> None:
        """Take the pending optimizer step of the critic, if any, and compute the gradients of the next one."""

    def wait_critic_step(self) -> Pause:
        """State of the critic's update after `start_critic_step`."""

    def discard_critic_step(self) -> None:
        """Discard the pending optimizer step of the critic and all later ones of this update."""

    def release(self, sequence_ids: list[int]) -> None:
        """Drop all state of sequences."""

    def start_save(self, folder: str) -> None:
        """Write the critic and its optimizer into `folder`. Drops every sequence; deltas must be sent again."""

    def wait_save(self) -> None:
        """Block until everything is written."""

    def limit(self, passes: dict[str, int]) -> None:
        """Lower the budgets of padded tokens per pass, by `PassBudget.name`."""

    def close(self) -> None:
        """Stop the scorers."""


# A sequence's raw score of each reward part, and `Scored.cached`.
Rewarded = tuple[tuple[float, ...], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Networks:
    """The scorers' networks, and the parts of the reward. `reference` and `critic` are None where others read them."""

    reference: Network | None
    critic: Network | None
    rewards: Rewards


def no_op() -> None:
    """Default `alive` callback."""


class ScorerSet:
    """Reward, reference and critic in this process: a `ScorerProtocol` whose `start_…` methods are synchronous.

    `alive` is called within long operations; scorers in a process or thread use it as a heartbeat.
    """

    def __init__(
        self,
        networks: Networks,
        trainer: CriticTrainer | None,
        slots: int,
        columns: int,
        pass_tokens: int,
        temperature: float,
        trace: Recorder,
    ) -> None:
        self.trainer = trainer
        self.saves_bytes = trainer.saves_bytes if trainer is not None else 0
        self.trace = trace
        self.temperature = temperature
        self.reads = reads = PassBudget(pass_tokens, name="reads")
        self.reference, self.critic = (
            IncrementalPrefill(network, slots, columns, reads) if network is not None else None
            for network in (networks.reference, networks.critic)
        )
        self.reward = RewardReader(networks.rewards, slots, columns, reads)
        self._budgets = [reads, *self.reward.budgets, *([trainer.budget] if trainer is not None else [])]
        for budget in self._budgets:
            budget.on_shrink, budget.alive = trace.record_shrunk, lambda: self.alive()
        self.alive: Callable[[], None] = no_op
        self.sequences: dict[int, ScoredSequence] = {}
        self._scores: dict[int, Scored] = {}
        self._evaluated: dict[int, float] = {}
        self._metrics: dict[str, float] = {}
        self._retained: RetainedForward | None = None  # the critic's pass over the batch
        self._stepwise: Stepwise | None = None
        self._pause = Pause()

    def begin(self, deltas: list[SequenceDelta]) -> None:
        """The critic recomputes every sequence held; see `ScorerProtocol.begin`."""
        if self.critic is not None:
            for sequence_id, sequence in self.sequences.items():
                self.critic.forget(sequence_id)
                sequence.values = []
        self._append(deltas)
        self._advance(set(self.sequences), chunk=0)

    def extend(self, deltas: list[SequenceDelta], chunk: int) -> None:
        """Append new tokens and prefill them in all three networks."""
        self._append(deltas)
        self._advance({delta.sequence_id for delta in deltas}, chunk)

    def _append(self, deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            sequence = self.sequences.get(delta.sequence_id)
            if sequence is None:
                sequence = self.sequences[delta.sequence_id] = ScoredSequence(delta.prompt_length, np.empty(0, dtype=np.int64))
            sequence.tokens = np.concatenate([sequence.tokens, delta.tokens])
            sequence.support += delta.support
            sequence.finished, sequence.stopped = delta.finished, delta.stopped

    def start_collect(self, sequence_ids: list[int]) -> None:
        rewards = self._rewards(sequence_ids)
        with self.trace.span("reward", "score", rows=len(sequence_ids)):
            self._scores = self._scored(sequence_ids, on_host([self.sequences[i].values for i in sequence_ids]), rewards)

    def forward_critic(self, sequence_ids: list[int]) -> None:
        trainer = self.trainer
        if trainer is None or self._retained is not None:
            return
        if trainer.ppo.optimizer_steps > 1 or not trainer.training.retained_passes:
            return
        rows = [self.sequences[i] for i in sequence_ids]
        with self.trace.span("critic", "update-critic", rows=len(rows)):
            self._retained = trainer.forward([row.tokens for row in rows], [row.prompt_length for row in rows])

    def start_critic_update(self, update: CriticUpdate) -> None:
        assert self.trainer is not None, "there is no critic to train"
        tokens = [self.sequences[i].tokens for i in update.sequence_ids]
        with self.trace.span("critic", "update-critic", rows=len(tokens)):
            self._metrics = self.trainer.update(tokens, update, self._retained)
        self.release(update.sequence_ids)

    @torch.no_grad()
    def start_evaluate(self, deltas: list[SequenceDelta]) -> None:
        tokens = {delta.sequence_id: delta.tokens for delta in deltas}
        with self.trace.span("reward", "eval", rows=len(deltas)):
            stopped = {delta.sequence_id for delta in deltas if delta.stopped}
            prompts = {delta.sequence_id: delta.prompt_length for delta in deltas}
            self.reward.read(tokens, prompts, set(tokens), stopped, self.alive)
            self.reward.read_together(self.alive)
        with self.trace.wait("eval"):
            self.reward.wait(list(tokens), self.alive)
        self._evaluated = {i: self.reward.total(parts) for i, parts in self.reward.scores(list(tokens)).items()}
        for i in tokens:
            self.reward.forget(i)

    def wait_evaluate(self) -> dict[int, float]:
        return self._evaluated

    def prepare_critic_update(self, update: CriticUpdate) -> None:
        assert self.trainer is not None, "there is no critic to train"
        tokens = [self.sequences[i].tokens for i in update.sequence_ids]
        self._stepwise = self.trainer.stepwise(tokens, update, self._retained)

    def start_critic_step(self) -> None:
        assert self._stepwise is not None
        with self.trace.span("critic", "update-critic"):
            self._pause = self._stepwise.advance()

    def wait_critic_step(self) -> Pause:
        return self._pause

    def discard_critic_step(self) -> None:
        assert self._stepwise is not None
        self._stepwise.discard()

    def release(self, sequence_ids: list[int]) -> None:
        self._retained = None
        for sequence_id in sequence_ids:
            self._drop(sequence_id)

    def start_save(self, folder: str) -> None:
        """Write the critic; drop every sequence, so that this run and a resumed one continue from the same state."""
        if self.trainer is not None:
            with self.trace.span("critic", "checkpoint"):
                self.trainer.save(folder)
        for sequence_id in list(self.sequences):
            self._drop(sequence_id)

    def wait_collect(self) -> dict[int, Scored]:
        return self._scores

    def wait_critic_update(self) -> dict[str, float]:
        return self._metrics

    def wait_save(self) -> None:
        """No-op: `start_save` is synchronous."""

    def limit(self, passes: dict[str, int]) -> None:
        limit(self._budgets, passes)

    def close(self) -> None:
        """Close the reward's services."""
        self.reward.close()

    def _drop(self, sequence_id: int) -> None:
        del self.sequences[sequence_id]
        self.reward.forget(sequence_id)
        for prefill in (self.reference, self.critic):
            if prefill is not None:
                prefill.forget(sequence_id)

    @torch.no_grad()
    def _advance(self, sequence_ids: set[int], chunk: int) -> None:
        sequences = {i: self.sequences[i] for i in sorted(sequence_ids)}
        if not sequences:
            return
        tokens = {i: sequence.tokens for i, sequence in sequences.items()}
        finished = {i for i, sequence in sequences.items() if sequence.finished}
        with self.trace.span("reward", "reward-prefill", chunk=chunk, rows=len(sequences)):
            prompts = {i: sequence.prompt_length for i, sequence in sequences.items()}
            stopped = {i for i, sequence in sequences.items() if sequence.stopped}
            self.reward.read(tokens, prompts, finished, stopped, self.alive)
        if self.reference is not None:
            with self.trace.span("reference", "reference-prefill", chunk=chunk, rows=len(sequences)):
                self._read_reference(self.reference.network, sequences, self.reference.read(tokens, finished))
        self._read_critic(sequences, tokens, finished, chunk)

    def _read_critic(
        self, sequences: dict[int, ScoredSequence], tokens: dict[int, NDArray[np.int64]], finished: set[int], chunk: int
    ) -> None:
        if self.critic is None:
            return
        with self.trace.span("critic", "critic-prefill", chunk=chunk, rows=len(sequences)):
            states = {i: _predicting(sequences[i], new) for i, new in self.critic.read(tokens, finished).items()}
            for group in _groups(list(states), [len(part) for part in states.values()]):  # the head reads a group together
                values = precise(self.critic.network.scalar(torch.cat([states[i] for i in group])))
                for i, row in zip(group, torch.split(values, [len(states[i]) for i in group]), strict=True):
                    sequences[i].values.append(row)

    def _rewards(self, sequence_ids: list[int]) -> dict[int, Rewarded]:
        """Block until the reward services have scored these finished sequences; a streamed part's scores come in one copy."""
        if not self.reward.is_scored(sequence_ids):
            with self.trace.wait("score"):
                self.reward.wait(sequence_ids, self.alive)
        parts, cached = self.reward.scores(sequence_ids), self.reward.cached(sequence_ids)
        return {i: (parts[i], cached[i]) for i in sequence_ids}

    def _read_reference(self, network: Network, sequences: dict[int, ScoredSequence], read: dict[int, NewStates]) -> None:
        """Append reference log-probs, over their support, of the response tokens that the new states predict."""
        predicting = {i: _predicting(sequences[i], new) for i, new in read.items()}
        predicting = {i: states for i, states in predicting.items() if len(states)}
        if not predicting:
            return
        tokens, support = list[NDArray[np.int64]](), list[Support]()
        for i, states in predicting.items():
            first = max(read[i].first + 1, sequences[i].prompt_length)
            tokens.append(sequences[i].tokens[first : first + len(states)])
            support.append(sequences[i].support[first - sequences[i].prompt_length :][: len(states)])
        states_MH = torch.cat(list(predicting.values()))  # the head reads all sequences together
        tokens_M = to_device(np.concatenate(tokens), states_MH.device)
        logprobs = sliced_logprobs(network, states_MH, tokens_M, concat_supports(support), self.temperature)
        for i, row in zip(predicting, torch.split(logprobs, [len(states) for states in predicting.values()]), strict=True):
            sequences[i].reference_logprobs.append(row)

    def _scored(
        self, sequence_ids: list[int], values: list[NDArray[np.float64]], rewards: dict[int, Rewarded]
    ) -> dict[int, Scored]:  # fmt: skip
        """Scores of sequences with these `rewards` and the critic's `values`; batches device-to-host copies."""
        logprobs = on_host([self.sequences[i].reference_logprobs for i in sequence_ids])
        return {
            i: Scored(self.reward.total(rewards[i][0]), reference, row, parts=rewards[i][0], cached=rewards[i][1])
            for i, reference, row in zip(sequence_ids, logprobs, values, strict=True)
        }


def _groups(ids: list[int], lengths: list[int]) -> list[list[int]]:
    """The ids in groups of at most `HEAD_STATES` states, or one id."""
    groups, total = list[list[int]](), HEAD_STATES + 1
    for i, length in zip(ids, lengths, strict=True):
        if total + length > HEAD_STATES:
            groups.append([])
            total = 0
        groups[-1].append(i)
        total += length
    return groups


def _predicting(sequence: ScoredSequence, new: NewStates) -> Tensor:
    """States [K', H] at the positions that predict known response tokens."""
    return new.hidden[max(sequence.prompt_length - 1 - new.first, 0) : -1]
