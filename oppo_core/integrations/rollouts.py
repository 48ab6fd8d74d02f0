"""Scored rollouts for another trainer: chunked decoding with a streamed reward model.

`oppo_core/rollout/pool.py` selects and defers sequences as in our own runs. There are no checkpoints and no importance
weights; every sequence has its log-probs under the current weights.
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
    """Sizes. `batch` and `overcommit` count sequences, `chunk` tokens, `max_age` steps."""

    batch: int
    overcommit: int
    chunk: int
    max_age: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """A batch of finished sequences in the order in which they were started, with their scores."""

    sequences: list[Sequence]
    scores: list[float]


class Rollouts:
    """Produces batches, each under the weights that `policy` has at the call.

    Every prompt drawn gets one response: in a batch, or among the `unconsumed` at the end.
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
        """`visible`: the tokens of a sequence that the reward model reads, prompt first; a prefix of the sequence, at least the
        prompt."""
        self.overlap = overlap
        self.steps = 0
        self.deferred = 0  # sequences trained in a later step than the one that started them
        self._policy = policy
        self._prompts = prompts
        self._settings = settings
        self._visible = visible
        slots, columns = overlap.batch + overlap.overcommit, settings.max_prompt + settings.max_new
        self._pool = Pool(overlap.batch, overlap.max_age)
        self._decoder = build_decoder(policy, settings, slots)
        self._reader = StreamedReward(reward, slots, columns, settings.micro_batch_tokens)
        self._device = next(policy.parameters()).device

    @property
    def unconsumed(self) -> list[Sequence]:
        """Sequences in flight: started and not yet in a batch."""
        return list(self._pool.sequences)

    def next(self) -> Rollout:
        """Decode until a batch is complete, streaming to the reward model.

        Raises:
            ValueError: a prompt is empty or too long.
        """
        with reserve_core(self._device):
            batch = self._batch(version=self.steps)
            self._record_current_logprobs([s for s in batch if s.token_versions[-1] < self.steps])
        self.steps += 1
        self.deferred += sum(sequence.age > 0 for sequence in batch)
        return Rollout(batch, self._reader.scores([sequence.sequence_id for sequence in batch]))

    def _batch(self, version: int) -> list[Sequence]:
        self._pool.top_up(self.overlap.overcommit, version, self._start_sequence)
        finishers: list[Sequence] = []
        try:
            self._decoder.begin(self._pool.unfinished(), version)
            while not self._pool.is_complete(finishers):
                live = list(self._decoder.live)
                finishers += self._chunk(version, finishers)
                shown = {s.sequence_id: self._visible(s) for s in live}
                self._reader.read(shown, {s.sequence_id for s in live if s.finished})
        finally:
            self._decoder.pause()  # the caller goes on to use the policy, after an error too
        return self._pool.take_batch(finishers)

    def _chunk(self, version: int, finishers: list[Sequence]) -> list[Sequence]:
        """Decode at most one chunk; stops at the token that completes the batch. Returns the finished sequences."""
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
    def _record_current_logprobs(self, surplus: list[Sequence]) -> None:
        """Compute the current weights' log-probs of finished sequences whose last tokens are stale; the decoder records the
        others'."""
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

    def _start_sequence(self, sequence_ids: range) -> list[Sequence]:
        (number,) = sequence_ids
        prompt = next(self._prompts)
        longest = self._settings.max_prompt
        if not 0 < len(prompt) <= longest:
            raise ValueError(f"prompt {number + 1} has {len(prompt)} tokens; there is room for 1 to {longest}")
        return [Sequence(number, number, prompt)]

    def close(self) -> None:
        """End the reward thread."""
        self._reader.close()


class StreamedReward:
    """A frozen reward model that prefills growing sequences in its own thread, on a GPU on its own stream."""

    def __init__(self, network: Network, slots: int, columns: int, budget: int) -> None:
        self._network = network
        self._stream = IncrementalPrefill(network, slots, columns, PassBudget(budget))
        self._aside = side_stream(next(network.parameters()).device)
        self._thread = ThreadPoolExecutor(1, "oppo-reward", torch.set_num_threads, (1,))
        self._orders: list[Future[None]] = []
        self._scores: dict[int, Tensor] = {}

    def read(self, tokens: dict[int, NDArray[np.int64]], finished: set[int]) -> None:
        """Queue the new tokens; `tokens` holds whole sequences, prompt first. Returns at once."""
        self._orders.append(self._thread.submit(self._read, tokens, finished))

    @torch.no_grad()
    def _read(self, tokens: dict[int, NDArray[np.int64]], finished: set[int]) -> None:
        with self._aside():
            for i, reading in self._stream.read(tokens, finished).items():
                self._scores[i] = self._network.scalar(reading.hidden[-1])

    def scores(self, sequence_ids: list[int]) -> list[float]:
        """Scores at the last tokens of finished sequences, which are then dropped. Waits; raises the thread's exceptions."""
        for order in self._orders:
            order.result()
        self._orders.clear()
        with self._aside():
            tokens: list[float] = torch.stack([self._scores.pop(i) for i in sequence_ids]).tolist()
        for i in sequence_ids:
            self._stream.forget(i)
        return tokens

    def close(self) -> None:
        """End the thread; queued reads are cancelled."""
        self._thread.shutdown(cancel_futures=True)


@contextmanager
def reserve_core(device: torch.device) -> Iterator[None]:
    """On a CPU with several cores, leave one core to the reward thread."""
    cores = torch.get_num_threads()
    if device.type != "cpu" or cores == 1:
        yield
        return
    torch.set_num_threads(cores - 1)
    try:
        yield
    finally:
        torch.set_num_threads(cores)
