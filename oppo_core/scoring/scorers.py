"""The three scorers over one set of sequences: reward at the end, reference log-probs and values a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.host_device import on_host, to_device
from oppo_core.models.protocol import Network
from oppo_core.models.upcast import precise
from oppo_core.ppo.critic import CriticTrainer, CriticUpdate
from oppo_core.ppo.oom_retry import PassBudget, limit
from oppo_core.ppo.retained_forward import HeldForward
from oppo_core.ppo.stepwise import Pause, Stepwise
from oppo_core.rewards.composite import RewardReader, Rewards
from oppo_core.rollout.sampling_support import restricted
from oppo_core.rollout.sequence import Support
from oppo_core.scoring.incremental_prefill import Reading, Stream
from oppo_core.scoring.results import Scored
from oppo_core.scoring.scored_sequence import Track
from oppo_core.trace.recorder import Recorder

# Tokens whose logits the reference makes together: over a large vocabulary those of a long answer would take gigabytes.
LOGITS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Growth:
    """News of one sequence: `tokens` follow what was told before. The first time they begin with the prompt.

    `support`: what the response tokens among them were sampled among, where sampling filters are on. `stopped`: whether a stop
    condition ended it.
    """

    sequence_id: int
    prompt_length: int
    tokens: NDArray[np.int64]
    finished: bool
    support: Support = field(default_factory=list)
    stopped: bool = False


class Scoring(Protocol):
    """What the training loop asks of the scorers, wherever they live.

    `start_…` returns at once when they live beside the actor; the `wait_…` of the same name returns its result. Only one may
    be outstanding.
    """

    saves_bytes: int  # about how much `start_save` writes

    def begin(self, growths: list[Growth]) -> None:
        """A step begins: take over new tokens, and read again what the critic, whose weights have changed, had read."""

    def extend(self, growths: list[Growth], chunk: int) -> None:
        """Hand over new tokens, in sequence_id order."""

    def start_collect(self, sequence_ids: list[int]) -> None:
        """Ask for the scores of finished sequences."""

    def wait_collect(self) -> dict[int, Scored]:
        """Scores by sequence_id."""

    def start_critic_update(self, update: CriticUpdate) -> None:
        """Train the critic on sequences that were collected, and let go of them."""

    def wait_critic_update(self) -> dict[str, float]:
        """The critic's metrics."""

    def start_judge(self, growths: list[Growth]) -> None:
        """Ask for the reward of whole answers that belong to no batch; nothing of them is kept."""

    def wait_judge(self) -> dict[int, float]:
        """The reward's weighted sum by sequence_id, as it is before shaping."""

    def prepare_critic_update(self, update: CriticUpdate) -> None:
        """As `start_critic_update`, but one optimizer step after the other, and the sequences are kept."""

    def start_critic_step(self) -> None:
        """Take the critic's optimizer step that is ready, if one is, and compute the gradients of the next one."""

    def wait_critic_step(self) -> Pause:
        """Where the critic's update stands then."""

    def discard_critic_step(self) -> None:
        """Leave out the critic's step that is ready, and those that would follow."""

    def release(self, sequence_ids: list[int]) -> None:
        """Let go of sequences that nobody will ask for again."""

    def start_save(self, folder: str) -> None:
        """Write the critic and its optimizer into `folder`. Every sequence is forgotten, and told again later."""

    def wait_save(self) -> None:
        """Returns when everything is written."""

    def limit(self, passes: dict[str, int]) -> None:
        """Passes have at most so many padded tokens from now on, by the name that goes with them (`PassBudget`)."""

    def close(self) -> None:
        """End them."""


@dataclass(frozen=True, slots=True)
class Networks:
    """The scorers' weights, and what the reward is made of."""

    reference: Network
    critic: Network | None
    rewards: Rewards


def nobody_asks() -> None:
    """What a scorer in the engine's own process says while it waits: nothing."""


class ScorerSet:
    """Reward, reference and critic in this process. Also a `Scoring` whose `start_…` do their work on the spot.

    `alive` is called while something takes long: a process of its own says by it that it has not hung.
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
        reads = PassBudget(pass_tokens, name="reads")
        self.reference = Stream(networks.reference, slots, columns, reads)
        self.critic = Stream(networks.critic, slots, columns, reads) if networks.critic is not None else None
        self.reward = RewardReader(networks.rewards, slots, columns, reads)
        self._budgets = [reads, *self.reward.budgets, *([trainer.budget] if trainer is not None else [])]
        for budget in self._budgets:
            budget.told, budget.alive = trace.ran_short, lambda: self.alive()
        self.alive: Callable[[], None] = nobody_asks
        self.tracks: dict[int, Track] = {}
        self._scores: dict[int, Scored] = {}
        self._judged: dict[int, float] = {}
        self._metrics: dict[str, float] = {}
        self._held: HeldForward | None = None  # the critic's pass over the batch, where a subclass keeps it for the update
        self._stepwise: Stepwise | None = None
        self._pause = Pause()

    def begin(self, growths: list[Growth]) -> None:
        """The critic re-reads every sequence held; see `Scoring.begin`."""
        if self.critic is not None:
            for sequence_id, track in self.tracks.items():
                self.critic.forget(sequence_id)
                track.values = []
        self._take(growths)
        self._advance(set(self.tracks), chunk=0)

    def extend(self, growths: list[Growth], chunk: int) -> None:
        """Take over new tokens and read them with all three networks."""
        self._take(growths)
        self._advance({growth.sequence_id for growth in growths}, chunk)

    def _take(self, growths: list[Growth]) -> None:
        for growth in growths:
            track = self.tracks.get(growth.sequence_id)
            if track is None:
                track = self.tracks[growth.sequence_id] = Track(growth.prompt_length, np.empty(0, dtype=np.int64))
            track.tokens = np.concatenate([track.tokens, growth.tokens])
            track.support += growth.support
            track.finished, track.stopped = growth.finished, growth.stopped

    def start_collect(self, sequence_ids: list[int]) -> None:
        """Scores of finished sequences, as `Scored`."""
        self._await_rewards(sequence_ids)
        with self.trace.span("reward", "score", rows=len(sequence_ids)):
            self._scores = self._scored(sequence_ids, on_host([self.tracks[i].values for i in sequence_ids]))

    def start_critic_update(self, update: CriticUpdate) -> None:
        """Train the critic and let go of the batch."""
        assert self.trainer is not None, "there is no critic to train"
        tokens = [self.tracks[i].tokens for i in update.sequence_ids]
        with self.trace.span("critic", "update-critic", rows=len(tokens)):
            self._metrics = self.trainer.update(tokens, update, self._held)
        self.release(update.sequence_ids)

    @torch.no_grad()
    def start_judge(self, growths: list[Growth]) -> None:
        """See `Scoring.start_judge`."""
        tokens = {growth.sequence_id: growth.tokens for growth in growths}
        with self.trace.span("reward", "eval", rows=len(growths)):
            stopped = {growth.sequence_id for growth in growths if growth.stopped}
            prompts = {growth.sequence_id: growth.prompt_length for growth in growths}
            self.reward.read(tokens, prompts, set(tokens), stopped, self.alive)
        with self.trace.wait("eval"):
            self.reward.wait(list(tokens), self.alive)
        self._judged = {i: self.reward.total(parts) for i, parts in self.reward.scores(list(tokens)).items()}
        for i in tokens:
            self.reward.forget(i)

    def wait_judge(self) -> dict[int, float]:
        """See `Scoring.wait_judge`."""
        return self._judged

    def prepare_critic_update(self, update: CriticUpdate) -> None:
        """See `Scoring.prepare_critic_update`."""
        assert self.trainer is not None, "there is no critic to train"
        tokens = [self.tracks[i].tokens for i in update.sequence_ids]
        self._stepwise = self.trainer.stepwise(tokens, update, self._held)

    def start_critic_step(self) -> None:
        """See `Scoring.start_critic_step`."""
        assert self._stepwise is not None
        with self.trace.span("critic", "update-critic"):
            self._pause = self._stepwise.advance()

    def wait_critic_step(self) -> Pause:
        """See `Scoring.wait_critic_step`."""
        return self._pause

    def discard_critic_step(self) -> None:
        """See `Scoring.discard_critic_step`."""
        assert self._stepwise is not None
        self._stepwise.discard()

    def release(self, sequence_ids: list[int]) -> None:
        """See `Scoring.release`."""
        for sequence_id in sequence_ids:
            self._drop(sequence_id)

    def start_save(self, folder: str) -> None:
        """Write the critic; forget every sequence, so that a resumed run and this one go on from the same state."""
        if self.trainer is not None:
            with self.trace.span("critic", "checkpoint"):
                self.trainer.save(folder)
        for sequence_id in list(self.tracks):
            self._drop(sequence_id)

    def wait_collect(self) -> dict[int, Scored]:
        """Scores by sequence_id."""
        return self._scores

    def wait_critic_update(self) -> dict[str, float]:
        """The critic's metrics."""
        return self._metrics

    def wait_save(self) -> None:
        """Everything is written."""

    def limit(self, passes: dict[str, int]) -> None:
        """See `Scoring.limit`."""
        limit(self._budgets, passes)

    def close(self) -> None:
        """The reward's services are let go."""
        self.reward.close()

    def _drop(self, sequence_id: int) -> None:
        del self.tracks[sequence_id]
        self.reward.forget(sequence_id)
        self.reference.forget(sequence_id)
        if self.critic is not None:
            self.critic.forget(sequence_id)

    @torch.no_grad()
    def _advance(self, sequence_ids: set[int], chunk: int) -> None:
        tracks = {i: self.tracks[i] for i in sorted(sequence_ids)}
        if not tracks:
            return
        tokens = {i: track.tokens for i, track in tracks.items()}
        finished = {i for i, track in tracks.items() if track.finished}
        with self.trace.span("reward", "reward-prefill", chunk=chunk, rows=len(tracks)):
            prompts = {i: track.prompt_length for i, track in tracks.items()}
            stopped = {i for i, track in tracks.items() if track.stopped}
            self.reward.read(tokens, prompts, finished, stopped, self.alive)
        with self.trace.span("reference", "reference-prefill", chunk=chunk, rows=len(tracks)):
            for i, reading in self.reference.read(tokens, finished).items():
                tracks[i].reference_logprobs.append(self._logprobs(tracks[i], reading))
        self._read_critic(tracks, tokens, finished, chunk)

    def _read_critic(
        self, tracks: dict[int, Track], tokens: dict[int, NDArray[np.int64]], finished: set[int], chunk: int
    ) -> None:
        if self.critic is None:
            return
        with self.trace.span("critic", "critic-prefill", chunk=chunk, rows=len(tracks)):
            for i, reading in self.critic.read(tokens, finished).items():
                tracks[i].values.append(precise(self.critic.network.scalar(_predicting(tracks[i], reading))))

    def _await_rewards(self, sequence_ids: list[int]) -> None:
        """Returns when the reward services have answered for these finished sequences."""
        if self.reward.settled(sequence_ids):
            return
        with self.trace.wait("score"):
            self.reward.wait(sequence_ids, self.alive)

    def _logprobs(self, track: Track, reading: Reading) -> Tensor:
        """Log-probs of the response tokens that this reading lets the reference predict, among what they were sampled among."""
        states = _predicting(track, reading)
        first = max(reading.first + 1, track.prompt_length)
        told = to_device(track.tokens[first : first + len(states)], states.device)
        support = track.support[first - track.prompt_length :]
        rated = []
        for start in range(0, len(states), LOGITS_AT_ONCE):
            part = slice(start, start + LOGITS_AT_ONCE)
            logits = restricted(precise(self.reference.network.logits(states[part])) / self.temperature, support[part])
            rated.append(torch.log_softmax(logits, dim=-1).gather(-1, told[part, None]).squeeze(-1))
        return torch.cat(rated) if rated else told.new_empty(0, dtype=states.dtype)

    def _scored(self, sequence_ids: list[int], values: list[NDArray[np.float64]]) -> dict[int, Scored]:
        """What is known of sequences that have been waited for, with the critic's `values` of each, in few copies."""
        parts = self.reward.scores(sequence_ids)
        cached = self.reward.cached(sequence_ids)
        logprobs = on_host([self.tracks[i].reference_logprobs for i in sequence_ids])
        return {
            i: Scored(self.reward.total(parts[i]), reference, row, parts=parts[i], cached=cached[i])
            for i, reference, row in zip(sequence_ids, logprobs, values, strict=True)
        }


def _predicting(track: Track, reading: Reading) -> Tensor:
    """States [K', H] at the positions before response tokens that are already known."""
    return reading.hidden[max(track.prompt_length - 1 - reading.first, 0) : -1]
