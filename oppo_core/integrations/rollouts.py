"""Batches of scored answers for a trainer that is not ours: decoded chunk by chunk, while the reward model reads along.

What begins, what is deferred and what makes up a batch is decided as in our own runs (`oppo_core/rollout/pool.py`); nothing is
stored, and nothing corrects for older weights but that every answer tells its log-probs under the present ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.incremental_prefill import IncrementalPrefill
from oppo_core.models.microbatching import pass_costs, ragged_batches, response_states
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network
from oppo_core.models.upcast import precise
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.device_decoder import build_decoder
from oppo_core.rollout.pool import Pool
from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.thread import side_stream

Visible = Callable[[Sequence], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much is in flight. `batch` and `overcommit` count answers, `chunk` tokens, `max_age` steps."""

    batch: int
    overcommit: int
    chunk: int
    max_age: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """A batch of finished answers in the order in which they were begun, and the reward's score of each."""

    sequences: list[Sequence]
    scores: list[float]


class Rollouts:
    """Makes one batch after the other, each under the weights that `policy` has when it is asked for.

    Every prompt drawn is answered once: its answer is in one batch, or among the `unconsumed` at the end.
    """

    def __init__(
        self,
        policy: Network,
        reward: Network,
        prompts: Iterator[NDArray[np.int64]],
        overlap: Overlap,
        settings: DecodeSettings,
        visible: Visible = Sequence.tokens,
    ) -> None:
        """`visible`: what the reward model is shown of an answer so far, prompt first; its beginning, at least the prompt."""
        self.overlap = overlap
        self.steps = 0
        self.deferred = 0  # answers that were trained later than begun
        self._policy = policy
        self._prompts = prompts
        self._settings = settings
        self._visible = visible
        slots, columns = overlap.batch + overlap.overcommit, settings.max_prompt + settings.max_new
        self._pool = Pool(overlap.batch, overlap.max_age)
        self._decoder = build_decoder(policy, settings, slots)
        self._reader = ReadingAhead(reward, slots, columns, settings.micro_batch_tokens)
        self._device = next(policy.parameters()).device

    @property
    def unconsumed(self) -> list[Sequence]:
        """What is in flight: answers that are begun and in no batch yet."""
        return list(self._pool.sequences)

    def next(self) -> Rollout:
        """Decode until a batch is complete, while the reward model reads what is there.

        Raises:
            ValueError: a prompt is empty or longer than expected.
        """
        with one_core_left(self._device):
            batch = self._batch(version=self.steps)
            self._rate([s for s in batch if s.token_versions[-1] < self.steps])
        self.steps += 1
        self.deferred += sum(sequence.age > 0 for sequence in batch)
        return Rollout(batch, self._reader.scores([sequence.sequence_id for sequence in batch]))

    def _batch(self, version: int) -> list[Sequence]:
        self._pool.top_up(self.overlap.overcommit, version, self._begun)
        self._decoder.begin(self._pool.unfinished(), version)
        finishers: list[Sequence] = []
        while not self._pool.is_complete(finishers):
            live = list(self._decoder.live)
            finishers += self._chunk(version, finishers)
            shown = {s.sequence_id: self._visible(s) for s in live}
            self._reader.read(shown, {s.sequence_id for s in live if s.finished})
        return self._pool.take_batch(finishers)

    def _chunk(self, version: int, finishers: list[Sequence]) -> list[Sequence]:
        """At most a chunk's rounds; decoding stops at the token with which the batch is complete. Returns who finished."""
        done: list[Sequence] = []
        left = self.overlap.chunk
        while left:
            finished, used = self._decoder.advance(left, version)
            left -= used
            done += finished
            if finished and self._pool.is_complete(finishers + done):
                break
        return done

    @torch.no_grad()
    def _rate(self, surplus: list[Sequence]) -> None:
        """Note the present weights' log-probs of answers that older ones have finished; the decoder notes those of the others."""
        settings = self._settings
        lengths = [len(s.prompt) + s.length for s in surplus]
        for rows in ragged_batches(lengths, settings.micro_batch_tokens, None, pass_costs(self._policy)):
            chosen = [surplus[row] for row in rows]
            states = response_states(self._policy, [s.tokens() for s in chosen], [len(s.prompt) for s in chosen])
            logits = precise(self._policy.logits(states)) / settings.temperature
            tokens = torch.tensor([token for s in chosen for token in s.response], device=logits.device)
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, None]).squeeze(-1).cpu()
            for sequence, part in zip(chosen, torch.split(logprobs, [s.length for s in chosen]), strict=True):
                sequence.stale_logprobs = part.tolist()

    def _begun(self, sequence_ids: range) -> list[Sequence]:
        (number,) = sequence_ids
        prompt = next(self._prompts)
        longest = self._settings.max_prompt
        if not 0 < len(prompt) <= longest:
            raise ValueError(f"prompt {number + 1} has {len(prompt)} tokens; there is room for 1 to {longest}")
        return [Sequence(number, number, prompt)]

    def close(self) -> None:
        """End the reward's thread."""
        self._reader.close()


class ReadingAhead:
    """A frozen reward model that reads growing answers in a thread of its own, on a GPU on a stream of its own."""

    def __init__(self, network: Network, slots: int, columns: int, budget: int) -> None:
        self._network = network
        self._stream = IncrementalPrefill(network, slots, columns, PassBudget(budget))
        self._aside = side_stream(next(network.parameters()).device)
        self._thread = ThreadPoolExecutor(1, "oppo-reward", torch.set_num_threads, (1,))
        self._orders: list[Future[None]] = []
        self._scores: dict[int, Tensor] = {}

    def read(self, tokens: dict[int, NDArray[np.int64]], finished: set[int]) -> None:
        """Have it read what is new; `tokens` holds whole answers, prompt first. Returns at once."""
        self._orders.append(self._thread.submit(self._read, tokens, finished))

    @torch.no_grad()
    def _read(self, tokens: dict[int, NDArray[np.int64]], finished: set[int]) -> None:
        with self._aside():
            for i, reading in self._stream.read(tokens, finished).items():
                self._scores[i] = self._network.scalar(reading.hidden[-1])

    def scores(self, sequence_ids: list[int]) -> list[float]:
        """What it says at the last token of finished answers, which are forgotten. Waits; raises what its thread has raised."""
        for order in self._orders:
            order.result()
        self._orders.clear()
        with self._aside():
            tokens: list[float] = torch.stack([self._scores.pop(i) for i in sequence_ids]).tolist()
        for i in sequence_ids:
            self._stream.forget(i)
        return tokens

    def close(self) -> None:
        """End the thread; what it has not begun is left undone."""
        self._thread.shutdown(cancel_futures=True)


@contextmanager
def one_core_left(device: torch.device) -> Iterator[None]:
    """On a CPU this thread computes on one core less within it, where it has more than one: the reward's thread has that."""
    cores = torch.get_num_threads()
    if device.type != "cpu" or cores == 1:
        yield
        return
    torch.set_num_threads(cores - 1)
    try:
        yield
    finally:
        torch.set_num_threads(cores)
