"""The composite reward: streamed networks read in chunks, finished answers go to the other parts, scores are summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.incremental_prefill import IncrementalPrefill
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network
from oppo_core.rewards.protocol import Answer, FinishedReward, StreamingReward
from oppo_core.rewards.sharded_model import ShardedModelReward
from oppo_core.rollout.conversations import Conversations
from oppo_core.rollout.tokenizer import TextCodec

# Seconds between heartbeats while waiting for a service.
HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class Part:
    """One weighted source: a streamed network, or a reward of finished answers.

    `streaming`: the same object as `finished`, if it also reads unfinished answers.
    """

    weight: float
    network: Network | None = None
    finished: FinishedReward | None = None
    streaming: StreamingReward | None = None


@dataclass(frozen=True, slots=True)
class Rewards:
    """The parts of a run's reward. `codec` decodes answers; `conversations` has the turns of their prompts."""

    parts: list[Part]
    codec: TextCodec | None = None
    conversations: Conversations = field(default_factory=Conversations)

    def close(self) -> None:
        """Close what the parts have started, if there is no `RewardReader` to do so."""
        for part in self.parts:
            if part.finished is not None:
                part.finished.close()


class RewardReader:
    """Feeds the parts with answers, in the scorers' process."""

    def __init__(self, rewards: Rewards, slots: int, columns: int, budget: PassBudget) -> None:
        self._codec, self._turns = rewards.codec, rewards.conversations.messages
        self._weights = [part.weight for part in rewards.parts]
        self.streams: dict[int, IncrementalPrefill] = {}
        self.finished: dict[int, FinishedReward] = {}
        for number, part in enumerate(rewards.parts):
            if part.network is not None:
                self.streams[number] = IncrementalPrefill(part.network, slots, columns, budget)
            if part.finished is not None:
                self.finished[number] = part.finished
        self.streaming = [part.streaming for part in rewards.parts if part.streaming is not None]
        budgets = (getattr(part, "budget", None) for part in self.finished.values())
        self.budgets: list[PassBudget] = [own for own in budgets if own is not None]  # of parts that read in separate passes
        # Tensors until they are needed: reading one on a GPU synchronizes.
        self._streamed: dict[tuple[int, int], Tensor] = {}
        self._started: set[int] = set()

    def read(
        self,
        tokens: dict[int, NDArray[np.int64]],
        prompt_lengths: dict[int, int],
        finished: set[int],
        stopped: set[int],
        alive: Callable[[], None],
    ) -> None:
        """Read the new tokens of each sequence; `tokens` holds whole sequences, prompt first. Returns before services answer.

        `stopped`: those of `finished` that a stop condition ended. `alive`: heartbeat callback for long computations.

        Raises:
            RewardError: a part failed.
        """
        new = sorted(finished - self._started)
        self._started |= finished
        if new and self.finished:
            assert self._codec is not None
            rows = {i: tokens[i].tolist() for i in new}
            split = {i: (row[: prompt_lengths[i]], row[prompt_lengths[i] :]) for i, row in rows.items()}
            codec, turns = self._codec, self._turns
            answers = [Answer(i, prompt, response, codec, i in stopped, turns(prompt)) for i, (prompt, response) in split.items()]
            # Services first: they work while local parts compute.
            for part in sorted(self.finished.values(), key=lambda part: not part.is_remote):
                part.start(answers, alive)
        for streaming in self.streaming:
            streaming.read_partial({i: row for i, row in sorted(tokens.items()) if i not in finished})
        for number, stream in self.streams.items():
            for i, reading in stream.read(tokens, finished).items():
                if i in finished:
                    self._streamed[number, i] = stream.network.scalar(reading.hidden[-1])

    def read_together(self, alive: Callable[[], None]) -> None:
        """Let sharded reward models read what was submitted since the last call. Every rank must call it."""
        for part in self.finished.values():
            if isinstance(part, ShardedModelReward):
                part.read_waiting(alive)

    def is_scored(self, ids: list[int]) -> bool:
        """Whether every part has scored these. Raises RewardError when a part has failed."""
        return all(part.wait(ids, 0.0) for part in self.finished.values())

    def wait(self, ids: list[int], alive: Callable[[], None]) -> None:
        """Wait until every part has scored these finished sequences; calls `alive` every half second.

        Bounded by the services' circuit breakers. Raises RewardError when a part has failed.
        """
        for part in self.finished.values():
            while not part.wait(ids, HEARTBEAT_S):
                alive()

    def scores(self, sequence_ids: list[int]) -> dict[int, tuple[float, ...]]:
        """Each part's raw scores of sequences after `wait`; a streamed part's in one copy."""
        columns = [self._column(number, sequence_ids) for number in range(len(self._weights))]
        return {i: tuple(column[row] for column in columns) for row, i in enumerate(sequence_ids)}

    def cached(self, sequence_ids: list[int]) -> dict[int, tuple[int, int]]:
        """Sums over all parts of `StreamingReward.cached`, for sequences after `wait`."""
        by_part = {i: [part.cached(i) for part in self.streaming] for i in sequence_ids}
        return {i: (sum(known for known, _ in pairs), sum(hits for _, hits in pairs)) for i, pairs in by_part.items()}

    def _column(self, number: int, sequence_ids: list[int]) -> list[float]:
        if number in self.finished:
            return [self.finished[number].score(i) for i in sequence_ids]
        if not sequence_ids:
            return []
        streamed: list[float] = torch.stack([self._streamed[number, i] for i in sequence_ids]).tolist()
        return streamed

    def total(self, scores: tuple[float, ...]) -> float:
        """The weighted sum."""
        return sum(weight * score for weight, score in zip(self._weights, scores, strict=True))

    def forget(self, sequence_id: int) -> None:
        """Drop all state of a sequence; it may be read again."""
        self._started.discard(sequence_id)
        for number, stream in self.streams.items():
            stream.forget(sequence_id)
            self._streamed.pop((number, sequence_id), None)
        for part in self.finished.values():
            part.forget(sequence_id)

    def close(self) -> None:
        """Close all parts."""
        for part in self.finished.values():
            part.close()
