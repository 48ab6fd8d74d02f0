"""Continuous batching: every live sequence advances one token a round; finished ones leave the batch at once.

Live rows are kept in the cache's first slots, longest first, so that a round reads plain slices, one a band of rows of like
length. When a row leaves, others move up: the composition of a round depends on which sequences are unfinished, never on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from oppo_core.models.cache import Band, SlotCache
from oppo_core.models.host_device import to_device
from oppo_core.models.model_io import save_weights
from oppo_core.models.protocol import Network
from oppo_core.models.upcast import precise
from oppo_core.ppo.microbatching import pass_costs, ragged_batches, right_padded
from oppo_core.ppo.oom_retry import PassBudget
from oppo_core.rng import Use
from oppo_core.rollout.ends import ends
from oppo_core.rollout.sampling import Filters, sample, sample_among, uniforms
from oppo_core.rollout.sampling_support import recorded, restricted
from oppo_core.rollout.sequence import Sequence, Support
from oppo_core.rollout.stop_conditions import StopConditions

# One more attention call a layer costs about as much as looking at this many cached tokens (measured: hidden 128 and 256).
BAND_PAYS_CELLS = 600
KEPT, LIVE = "kept-cache.safetensors", "live"


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """What decoding depends on besides the weights. Lengths in tokens."""

    seed: int
    eos: int
    temperature: float
    max_prompt: int
    max_new: int
    micro_batch_tokens: int
    rates_stale: bool = False  # whether `begin` notes what the present weights think of earlier tokens (`integrations`)
    filters: Filters | None = None  # which tokens may be sampled; their choice is recorded a token
    keeps_cache: bool = False  # whether keys and values of deferred sequences outlive an update
    use: Use = Use.SAMPLING  # whose random numbers are drawn


class Choice(NamedTuple):
    """A sampled token, its log-prob, and what it was chosen among: empty, or one entry."""

    token: int
    logprob: float
    among: Support


class Decoding(Protocol):
    """What the training loop asks of a decoder, real or simulated."""

    live: list[Sequence]
    rounds: int
    decoded: int

    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        """A step begins: take over `sequences` under the weights of `version`; returns the tokens prefilled."""

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        """Decode up to `rounds` tokens a live sequence, but stop at the first round in which one finishes.

        Returns:
            Who finished, in sequence_id order, and the rounds that were used.
        """

    def rest(self) -> None:
        """The batch is complete: nothing is decoded before the next `begin`."""

    def save(self, folder: Path) -> None:
        """Write what an interruption must not lose besides the sequences: keys and values, where they outlive an update."""

    def load(self, folder: Path, sequences: list[Sequence]) -> None:
        """Take back what `save` wrote of `sequences`; `begin` comes next."""

    def close(self) -> None:
        """The run ends: let go of processes, where there are any."""


class Decoder:
    """Advances sequences token by token and writes tokens, log-probs and versions into them."""

    def __init__(
        self,
        actor: Network,
        settings: DecodeSettings,
        slots: int,
        stops: StopConditions | None = None,
    ) -> None:
        self.actor = actor
        self.settings = settings
        self.stops = stops
        self.budget = PassBudget(settings.micro_batch_tokens, name="prefill")
        weight = next(actor.parameters())
        self.cache = SlotCache(actor.cache_shape, slots, settings.max_prompt + settings.max_new, weight)
        self.live: list[Sequence] = []
        self.rounds = 0  # since `begin`
        self.decoded = 0  # tokens since `begin`
        self._filled: list[int] = []  # tokens of each live row whose keys and values are cached
        self._device = weight.device
        self._costs = pass_costs(actor)
        self._last: Tensor = torch.empty(0, dtype=torch.long, device=self._device)
        self._uniform = torch.empty(slots, settings.max_new, dtype=torch.float64, device=self._device)
        self._rows = torch.arange(slots, device=self._device)
        self._stops: list[int] = []  # where bands of rows of like length end

    @torch.no_grad()
    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        """Take over `sequences`, compute cached prefixes under the current weights; returns the tokens computed.

        All but the last token of each sequence are prefilled, unless its cache is kept; the last one is the next round's input.
        """
        if len(sequences) > self._uniform.shape[0]:
            raise ValueError(f"{len(sequences)} sequences for {self._uniform.shape[0]} slots")
        sequences = sorted(sequences, key=lambda s: -len(s.prompt) - s.length)
        kept = self._keep(sequences, version) if self.settings.keeps_cache else self._recompute(sequences)
        self.live = sequences
        self.rounds = self.decoded = 0
        tokens = [s.tokens() for s in sequences]
        self._filled = [len(t) - 1 for t in tokens]
        self._stops = self._bands()
        if self.stops is not None:
            self.stops.keep(s.sequence_id for s in sequences)
        self._last = torch.tensor([int(t[-1]) for t in tokens], device=self._device)
        self._draw_numbers()
        lacking = [0 if row in kept else length for row, length in enumerate(self._filled)]
        computed = sum(lacking)
        self.budget.shrinking("the actor's prefill", lambda: self._prefill(lacking, tokens))
        return computed

    def _prefill(self, lacking: list[int], tokens: list[NDArray[np.int64]]) -> None:
        """Keys and values of rows that lack so many; what a pass has computed is lacking no more, whatever the next one does."""
        for rows in ragged_batches(lacking, self.budget.tokens, None, self._costs):
            padded = to_device(right_padded([tokens[row][:-1] for row in rows]), self._device)
            window = self.cache.fresh_window(to_device(rows, self._device), padded.shape[1])
            hidden = self.actor.hidden(padded, window.positions_NT, window)
            if self.settings.rates_stale:
                self._rate([self.live[row] for row in rows], hidden)
            for row in rows:
                lacking[row] = 0

    def _keep(self, sequences: list[Sequence], version: int) -> set[int]:
        """Bring caches of sequences that were live to their new rows, and return these; note who is read anew under `version`."""
        before = {id(sequence): row for row, sequence in enumerate(self.live)}
        rows = [row for row, sequence in enumerate(sequences) if id(sequence) in before]
        if rows:
            sources = [before[id(sequences[row])] for row in rows]
            self.cache.rearrange(sources, rows, max(self._filled[row] for row in sources))
        for row in set(range(len(sequences))) - set(rows):
            sequences[row].kept_version = version
        return set(rows)

    @staticmethod
    def _recompute(sequences: list[Sequence]) -> set[int]:
        """No cache is kept, also where one was before the run's settings were changed."""
        for sequence in sequences:
            sequence.kept_version = None
        return set()

    def save(self, folder: Path) -> None:
        """See `Decoding.save`."""
        if self.settings.keeps_cache and self.live:
            ids = torch.tensor([s.sequence_id for s in self.live])
            save_weights(self.cache.copied(list(range(len(ids))), max(self._filled)) | {LIVE: ids}, folder / KEPT)

    def load(self, folder: Path, sequences: list[Sequence]) -> None:
        """See `Decoding.load`."""
        if not (folder / KEPT).exists():
            return
        tensors, known = load_file(folder / KEPT), {s.sequence_id: s for s in sequences}
        ids = tensors.pop(LIVE).tolist()
        rows = [row for row, sequence_id in enumerate(ids) if sequence_id in known]
        self.live = [known[ids[row]] for row in rows]
        self._filled = [len(s.prompt) + s.length - 1 for s in self.live]
        self.cache.put_back(list(range(len(rows))), {name: tensor[rows] for name, tensor in tensors.items()})

    def _draw_numbers(self) -> None:
        settings = self.settings
        numbers = [uniforms(settings.seed, s.sequence_id, settings.max_new, settings.use) for s in self.live]
        if numbers:
            self._uniform[: len(numbers)] = to_device(torch.from_numpy(np.stack(numbers)), self._device)

    def _rate(self, sequences: list[Sequence], hidden_NTH: Tensor) -> None:
        """Note the log-probs that the present weights give to the response tokens so far."""
        for sequence, states in zip(sequences, hidden_NTH, strict=True):
            if not sequence.length:
                continue
            first = len(sequence.prompt) - 1
            logits = precise(self.actor.logits(states[first : first + sequence.length])) / self.settings.temperature
            logits = restricted(logits, sequence.support)
            told = torch.tensor(sequence.response, device=logits.device)[:, None]
            sequence.stale_logprobs = torch.log_softmax(logits, dim=-1).gather(-1, told).squeeze(-1).tolist()

    def rest(self) -> None:
        """See `Decoding.rest`: the weights are the trainer's own, and what is cached stays where it is."""

    def close(self) -> None:
        """See `Decoding.close`: there is nothing to let go of."""

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
        self.rounds += 1
        self.decoded += len(self.live)
        return self._record(self._sample(), version)

    def _sample(self) -> list[Choice]:
        """The next token of every live row, by one forward pass."""
        count = len(self.live)
        positions_N1 = torch.tensor(self._filled, device=self._device)[:, None]
        starts = [0, *self._stops]
        bands = tuple(Band(a, b, max(self._filled[a:b]) + 1) for a, b in pairwise(starts))
        window = self.cache.window(slice(0, count), positions_N1, max(self._filled) + 1, bands)
        hidden_N1H = self.actor.hidden(self._last[:, None], positions_N1, window)
        offsets = torch.tensor([s.length for s in self.live], device=self._device)
        uniform_N = self._uniform[self._rows[:count], offsets]
        self._last, choices = self._choose(self.actor.logits(hidden_N1H[:, 0]), uniform_N)
        return choices

    def _choose(self, logits_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, list[Choice]]:
        """A token a row, as a tensor [N] and with what is recorded of it."""
        if self.settings.filters is None:
            tokens_N, logp_N = sample(logits_NV, uniform_N, self.settings.temperature)
            support: list[Support] = [[]] * len(tokens_N)
        else:
            tokens_N, logp_N, allowed_NV = sample_among(logits_NV, uniform_N, self.settings.temperature, self.settings.filters)
            support = [[left] for left in recorded(allowed_NV)]
        return tokens_N, list(map(Choice, tokens_N.tolist(), logp_N.tolist(), support))

    def _record(self, choices: list[Choice], version: int) -> list[Sequence]:
        done_rows = []
        for row, (sequence, choice) in enumerate(zip(self.live, choices, strict=True)):
            self._filled[row] += 1
            if self._note(sequence, choice, version):
                done_rows.append(row)
        if not done_rows:
            return []
        done = [self.live[row] for row in done_rows]
        for row in reversed(done_rows):
            self._leave(row)
        self._stops = self._bands()
        return sorted(done, key=lambda s: s.sequence_id)

    def _note(self, sequence: Sequence, choice: Choice, version: int) -> bool:
        """Write a token into its sequence; returns whether it is the last."""
        sequence.response.append(choice.token)
        sequence.behaviour_logprobs.append(choice.logprob)
        sequence.support += choice.among
        sequence.token_versions.append(version)
        return self._ends(sequence, choice.token)

    def _ends(self, sequence: Sequence, token: int) -> bool:
        """Whether `token`, which `sequence` has just got, is its last; notes why."""
        return ends(sequence, self.settings.eos, self.settings.max_new, self.stops)

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
