"""Continuous batching: every live sequence advances one token a round; finished ones leave the batch at once.

Live rows are kept in the cache's first slots, longest first, so that a round reads plain slices, one a band of rows of like
length. When a row leaves, others move up: the composition of a round depends on which sequences are unfinished, never on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from oppo_core.models.cache import Band, SlotCache
from oppo_core.models.protocol import Network
from oppo_core.ppo.batches import ragged_batches, right_padded
from oppo_core.rollout.sampling import sample, uniforms
from oppo_core.rollout.sequence import Sequence

# One more attention call a layer costs about as much as looking at this many cached tokens (measured: hidden 128 and 256).
BAND_PAYS_CELLS = 600


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
        self._device = weight.device
        self._last: Tensor = torch.empty(0, dtype=torch.long, device=self._device)
        self._uniform = torch.empty(slots, settings.max_new, dtype=torch.float64, device=self._device)
        self._rows = torch.arange(slots, device=self._device)
        self._stops: list[int] = []  # where bands of rows of like length end

    @torch.no_grad()
    def begin(self, sequences: list[Sequence]) -> int:
        """Take over `sequences`, recompute every cached prefix under the current weights; returns the tokens computed.

        All but the last token of each sequence are prefilled; the last one is the next round's input.
        """
        if len(sequences) > self._uniform.shape[0]:
            raise ValueError(f"{len(sequences)} sequences for {self._uniform.shape[0]} slots")
        self.live = sequences = sorted(sequences, key=lambda s: -len(s.prompt) - s.length)
        self.rounds = self.decoded = 0
        tokens = [s.tokens() for s in sequences]
        self._filled = [len(t) - 1 for t in tokens]
        self._stops = self._bands()
        self._last = torch.tensor([int(t[-1]) for t in tokens], device=self._device)
        for row, sequence in enumerate(sequences):
            numbers = uniforms(self.settings.seed, sequence.sequence_id, self.settings.max_new)
            self._uniform[row] = torch.from_numpy(numbers)
        for rows in ragged_batches(self._filled, self.settings.micro_batch_tokens):
            padded = right_padded([tokens[row][:-1] for row in rows]).to(self._device)
            window = self.cache.fresh_window(self._rows[rows], padded.shape[1])
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
        positions_N1 = torch.tensor(self._filled, device=self._device)[:, None]
        starts = [0, *self._stops]
        bands = tuple(Band(a, b, max(self._filled[a:b]) + 1) for a, b in pairwise(starts))
        window = self.cache.window(slice(0, count), positions_N1, max(self._filled) + 1, bands)
        hidden_N1H = self.actor.hidden(self._last[:, None], positions_N1, window)
        offsets = torch.tensor([s.length for s in self.live], device=self._device)
        uniform_N = self._uniform[self._rows[:count], offsets]
        self._last, logp_N = sample(self.actor.logits(hidden_N1H[:, 0]), uniform_N, self.settings.temperature)
        return self._record(self._last.tolist(), logp_N.tolist(), version)

    def _record(self, tokens: list[int], logprobs: list[float], version: int) -> list[Sequence]:
        done_rows = []
        for row, (sequence, token, logprob) in enumerate(zip(self.live, tokens, logprobs, strict=True)):
            sequence.response.append(token)
            sequence.behaviour_logprobs.append(logprob)
            sequence.token_versions.append(version)
            self._filled[row] += 1
            if self._ends(sequence, token):
                done_rows.append(row)
        if not done_rows:
            return []
        done = [self.live[row] for row in done_rows]
        for row in reversed(done_rows):
            self._leave(row)
        self._stops = self._bands()
        return sorted(done, key=lambda s: s.sequence_id)

    def _ends(self, sequence: Sequence, token: int) -> bool:
        """Whether `token`, which `sequence` has just got, is its last; notes why."""
        sequence.ended_by_eos = token == self.settings.eos
        sequence.finished = sequence.ended_by_eos or sequence.length == self.settings.max_new
        return sequence.finished

    def _leave(self, row: int) -> None:
        """Close the hole: the last row of its band moves there, the last one of the next band into its place, and so on."""
        hole = row
        for number, stop in enumerate(self._stops):
            if stop <= row:
                continue
            if hole != stop - 1:
                self._move(stop - 1, hole)
            hole = stop - 1
            self._stops[number] -= 1
        self.live.pop()
        self._filled.pop()
        self._last = self._last[: len(self.live)]

    def _move(self, source: int, target: int) -> None:
        self.cache.move(source, target, self._filled[source])
        self._uniform[target] = self._uniform[source]
        self._last[target] = self._last[source]
        self.live[target] = self.live[source]
        self._filled[target] = self._filled[source]

    def _bands(self) -> list[int]:
        """Where to cut the rows, longest first, so that attention over the cells saved pays for another call."""
        longest = list(accumulate(reversed(self._filled), max))[::-1]
        stops, first = [], 0
        for row in range(1, len(longest)) if self._device.type == "cpu" else ():
            if (longest[first] - longest[row]) * (len(longest) - row) >= BAND_PAYS_CELLS:
                stops.append(row)
                first = row
        return [*stops, len(longest)]
