"""All parts of a reward at work: streamed networks read along, finished answers go to the others, scores are summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.incremental_prefill import IncrementalPrefill
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network
from oppo_core.rewards.protocol import Answer, FinishedReward, GrowingReward
from oppo_core.rollout.tokenizer import TextCodec

# So often whoever waits for a service says that it is alive, seconds.
SIGN_OF_LIFE_S = 0.5


@dataclass(frozen=True, slots=True)
class Part:
    """One weighted source: a network that reads the actor's tokens as they stream, or what scores finished answers.

    `growing`: the same as `finished`, where it reads unfinished ones along.
    """

    weight: float
    network: Network | None = None
    finished: FinishedReward | None = None
    growing: GrowingReward | None = None


@dataclass(frozen=True, slots=True)
class Rewards:
    """The reward of a run, before it is put to work. `codec` turns answers into text."""

    parts: list[Part]
    codec: TextCodec | None = None

    def close(self) -> None:
        """Let go of what the parts have started, where no `RewardReader` will."""
        for part in self.parts:
            if part.finished is not None:
                part.finished.close()


class RewardReader:
    """Feeds the parts with answers, in the process of the scorers."""

    def __init__(self, rewards: Rewards, slots: int, columns: int, budget: PassBudget) -> None:
        self._codec = rewards.codec
        self._weights = [part.weight for part in rewards.parts]
        self.streams: dict[int, IncrementalPrefill] = {}
        self.finished: dict[int, FinishedReward] = {}
        for number, part in enumerate(rewards.parts):
            if part.network is not None:
                self.streams[number] = IncrementalPrefill(part.network, slots, columns, budget)
            if part.finished is not None:
                self.finished[number] = part.finished
        self.growing = [part.growing for part in rewards.parts if part.growing is not None]
        found = (getattr(part, "budget", None) for part in self.finished.values())
        self.budgets: list[PassBudget] = [own for own in found if own is not None]  # of those that read in passes of their own
        # Tensors until they are asked for: on a GPU, looking at one waits for everything queued before.
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
        """Read what is new of each sequence; `tokens` holds whole sequences, prompt first. Returns before services answer.

        `stopped`: those of `finished` that a stop condition ended.

        `alive` is called now and then by parts that compute for long.

        Raises:
            RewardError: a part failed.
        """
        self._start([i for i in sorted(finished) if i not in self._started], tokens, prompt_lengths, stopped, alive)
        for part in self.growing:
            part.read_on({i: row for i, row in sorted(tokens.items()) if i not in finished})
        for number, stream in self.streams.items():
            for i, reading in stream.read(tokens, finished).items():
                if i in finished:
                    self._streamed[number, i] = stream.network.scalar(reading.hidden[-1])

    def _start(
        self,
        ids: list[int],
        tokens: dict[int, NDArray[np.int64]],
        prompt_lengths: dict[int, int],
        stopped: set[int],
        alive: Callable[[], None],
    ) -> None:
        if not ids:
            return
        self._started |= set(ids)
        if not self.finished:
            return
        answers = self._answers(ids, tokens, prompt_lengths, stopped)
        # Services first: they work while those that compute here do.
        for part in sorted(self.finished.values(), key=lambda part: not part.elsewhere):
            part.start(answers, alive)

    def _answers(
        self, ids: list[int], tokens: dict[int, NDArray[np.int64]], prompt_lengths: dict[int, int], stopped: set[int]
    ) -> list[Answer]:
        assert self._codec is not None
        rows = {i: tokens[i].tolist() for i in ids}
        return [
            Answer(i, row[: prompt_lengths[i]], row[prompt_lengths[i] :], self._codec, i in stopped) for i, row in rows.items()
        ]

    def settled(self, ids: list[int]) -> bool:
        """Whether every part has scored these. Raises RewardError when a part has failed."""
        return all(part.wait(ids, 0.0) for part in self.finished.values())

    def wait(self, ids: list[int], alive: Callable[[], None]) -> None:
        """Returns when every part has scored these finished sequences; calls `alive` meanwhile, every half second.

        Bounded by the services' circuit breakers. Raises RewardError when a part has failed.
        """
        for part in self.finished.values():
            while not part.wait(ids, SIGN_OF_LIFE_S):
                alive()

    def scores(self, sequence_ids: list[int]) -> dict[int, tuple[float, ...]]:
        """Each part's raw score of sequences that have been waited for; of a streamed part all in one copy."""
        columns = [self._column(number, sequence_ids) for number in range(len(self._weights))]
        return {i: tuple(column[row] for column in columns) for row, i in enumerate(sequence_ids)}

    def cached(self, sequence_ids: list[int]) -> dict[int, tuple[int, int]]:
        """See `GrowingReward.cached`: all parts' sums, of sequences that have been waited for."""
        told = {i: [part.cached(i) for part in self.growing] for i in sequence_ids}
        return {i: (sum(known for known, _ in pairs), sum(found for _, found in pairs)) for i, pairs in told.items()}

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
        """Drop everything of a sequence; it may be told again."""
        self._started.discard(sequence_id)
        for number, stream in self.streams.items():
            stream.forget(sequence_id)
            self._streamed.pop((number, sequence_id), None)
        for part in self.finished.values():
            part.forget(sequence_id)

    def close(self) -> None:
        """Let go of everything."""
        for part in self.finished.values():
            part.close()
