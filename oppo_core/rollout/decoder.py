"""Continuous batching: every live sequence advances one token a round; finished ones leave the batch at once.

Live rows are kept in the cache's first slots, in order, so that a round reads a plain slice. When a row leaves, the last
row takes its slot: the composition of a round depends on which sequences are unfinished, never on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oppo_core.models.cache import SlotCache
from oppo_core.models.protocol import Network
from oppo_core.ppo.batches import ragged_batches, right_padded
from oppo_core.rollout.sampling import sample, uniforms
from oppo_core.rollout.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """What decoding depends on besides the weights. Lengths in tokens."""

    seed: int
    eos: int
    temperature: float
    max_prompt: int
    max_new: int
    micro_batch_tokens: int
    rates_stale: bool = False  # whether `begin` notes what the present weights think of earlier tokens (update overlap)


class Decoding(Protocol):
    """What the training loop asks of a decoder, real or simulated."""

    live: list[Sequence]
    rounds: int
    decoded: int

    def begin(self, sequences: list[Sequence]) -> int:
        """A step begins: take over `sequences` under the present weights; returns the tokens prefilled."""

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        """Decode up to `rounds` tokens a live sequence, but stop at the first round in which one finishes.

        Returns:
            Who finished, in sequence_id order, and the rounds that were used.
        """


class Decoder:
    """Advances sequences token by token and writes tokens, log-probs and versions into them."""

    def __init__(self, actor: Network, settings: DecodeSettings, slots: int) -> None:
        self.actor = actor
        self.settings = settings
        weight = next(actor.parameters())
        self.cache = SlotCache(actor.cache_shape, slots, settings.max_prompt + settings.max_new, weight)
        self.live: list[Sequence] = []
        self.rounds = 0  # since `begin`
        self.decoded = 0  # tokens since `begin`
        self._filled: list[int] = []  # tokens of each live row whose keys and values are cached
        self._last: Tensor = torch.empty(0, dtype=torch.long)
        self._uniform = torch.empty(slots, settings.max_new, dtype=torch.float64)

    @torch.no_grad()
    def begin(self, sequences: list[Sequence]) -> int:
        """Take over `sequences`, recompute every cached prefix under the current weights; returns the tokens computed.

        All but the last token of each sequence are prefilled; the last one is the next round's input.
        """
        if len(sequences) > self._uniform.shape[0]:
            raise ValueError(f"{len(sequences)} sequences for {self._uniform.shape[0]} slots")
        self.live = list(sequences)
        self.rounds = self.decoded = 0
        tokens = [s.tokens() for s in sequences]
        self._filled = [len(t) - 1 for t in tokens]
        self._last = torch.tensor([int(t[-1]) for t in tokens])
        for row, sequence in enumerate(sequences):
            numbers = uniforms(self.settings.seed, sequence.sequence_id, self.settings.max_new)
            self._uniform[row] = torch.from_numpy(numbers)
        for rows in ragged_batches(self._filled, self.settings.micro_batch_tokens):
            padded = right_padded([tokens[row][:-1] for row in rows])
            window = self.cache.fresh_window(torch.tensor(rows), padded.shape[1])
            hidden = self.actor.hidden(padded, window.positions_NT, window)
            if self.settings.rates_stale:
                self._rate([sequences[row] for row in rows], hidden)
        return sum(self._filled)

    def _rate(self, sequences: list[Sequence], hidden_NTH: Tensor) -> None:
        """Note the log-probs that the present weights give to the response tokens so far."""
        for sequence, states in zip(sequences, hidden_NTH, strict=True):
            if not sequence.length:
                continue
            first = len(sequence.prompt) - 1
            logits = self.actor.logits(states[first : first + sequence.length]) / self.settings.temperature
            told = torch.tensor(sequence.response, device=logits.device)[:, None]
            sequence.stale_logprobs = torch.log_softmax(logits, dim=-1).gather(-1, told).squeeze(-1).tolist()

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        """See `Decoding.advance`."""
        for used in range(1, rounds + 1):
            finished = self.round(version)
            if finished:
                return finished, used
        return [], rounds

    @torch.no_grad()
    def round(self, version: int) -> list[Sequence]:
        """Decode one token for every live sequence; returns those that finished, in sequence_id order."""
        count = len(self.live)
        self.rounds += 1
        self.decoded += count
        positions_N1 = torch.tensor(self._filled)[:, None]
        window = self.cache.window(slice(0, count), positions_N1, max(self._filled) + 1)
        hidden_N1H = self.actor.hidden(self._last[:, None], positions_N1, window)
        offsets = torch.tensor([s.length for s in self.live])
        uniform_N = self._uniform[torch.arange(count), offsets]
        self._last, logp_N = sample(self.actor.logits(hidden_N1H[:, 0]), uniform_N, self.settings.temperature)
        return self._record(self._last.tolist(), logp_N.tolist(), version)

    def _record(self, tokens: list[int], logprobs: list[float], version: int) -> list[Sequence]:
        done_rows = []
        for row, (sequence, token, logprob) in enumerate(zip(self.live, tokens, logprobs, strict=True)):
            sequence.response.append(token)
            sequence.behaviour_logprobs.append(logprob)
            sequence.token_versions.append(version)
            self._filled[row] += 1
            if token == self.settings.eos or sequence.length == self.settings.max_new:
                sequence.finished = True
                sequence.ended_by_eos = token == self.settings.eos
                done_rows.append(row)
        done = [self.live[row] for row in done_rows]
        for row in reversed(done_rows):
            self._leave(row)
        return sorted(done, key=lambda s: s.sequence_id)

    def _leave(self, row: int) -> None:
        last = len(self.live) - 1
        if row != last:
            self.cache.move(last, row, self._filled[last])
            self._uniform[row] = self._uniform[last]
            self._last[row] = self._last[last]
            self.live[row] = self.live[last]
            self._filled[row] = self._filled[last]
        self.live.pop()
        self._filled.pop()
        self._last = self._last[:last]
