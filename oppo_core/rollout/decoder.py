"""Continuous batching over a slot KV cache: every live sequence advances one token per round; finished ones leave at once.

Live rows occupy the first cache slots, longest first, so that a round reads contiguous slices, one per band of rows of similar
length. When a row leaves, others move up. The composition of a round depends on which sequences are unfinished, never on timing.
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
from oppo_core.models.decode_weights import DecodeWeights
from oppo_core.models.host_device import to_device
from oppo_core.models.microbatching import pass_costs, ragged_batches, right_padded
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network
from oppo_core.models.tensor_files import save_weights
from oppo_core.models.upcast import precise
from oppo_core.rng import Use
from oppo_core.rollout.sampling import Filters, sample, sample_filtered, uniforms
from oppo_core.rollout.sampling_support import encode_support, mask_unsupported
from oppo_core.rollout.sequence import Sequence, Support
from oppo_core.rollout.stop_conditions import StopConditions, update_finished

# One more attention call per layer costs about as much as attending to this many cached tokens (measured: hidden 128 and 256).
BAND_COST_CELLS = 600
CACHE_FILE, LIVE_KEY = "kept-cache.safetensors", "live"


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """Decoding parameters besides the weights. Lengths in tokens."""

    seed: int
    eos: int
    temperature: float
    max_prompt: int
    max_new: int
    micro_batch_tokens: int
    scores_stale_tokens: bool = False  # whether `begin` records log-probs of earlier tokens under the current weights
    filters: Filters | None = None  # top-k, top-p, min-p; the support of each sampled token is recorded
    keeps_cache: bool = False  # whether the KV cache of deferred sequences is kept across an update
    use: Use = Use.SAMPLING  # the random stream to draw from


class SampledToken(NamedTuple):
    """A sampled token, its log-prob, and its support: one entry with sampling filters, else none."""

    token: int
    logprob: float
    among: Support


class DecoderProtocol(Protocol):
    """Interface between the training loop and a decoder: torch, vLLM or simulated."""

    live: list[Sequence]
    rounds: int
    decoded: int

    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        """Start a step: load `sequences` under the weights of `version`. Returns the number of tokens prefilled."""

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        """Decode up to `rounds` tokens per live sequence; stop at the first round in which a sequence finishes.

        Returns:
            Finished sequences in sequence_id order, and the number of rounds decoded.
        """

    def pause(self) -> None:
        """The batch is complete: no decoding until the next `begin`."""

    def save(self, folder: Path) -> None:
        """Write decoder state that a checkpoint needs besides the sequences, such as a KV cache kept across updates."""

    def load(self, folder: Path, sequences: list[Sequence]) -> None:
        """Restore what `save` wrote for `sequences`. `begin` must follow."""

    def close(self) -> None:
        """Release resources such as child processes."""


class Decoder:
    """Decodes with torch and writes tokens, log-probs and policy versions into the sequences."""

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
        self._weights = DecodeWeights(actor)
        weight = next(actor.parameters())
        self.cache = SlotCache(actor.cache_shape, slots, settings.max_prompt + settings.max_new, weight)
        self.live: list[Sequence] = []
        self.rounds = 0  # since `begin`
        self.decoded = 0  # tokens since `begin`
        self._filled: list[int] = []  # cached tokens of each live row
        self._device = weight.device
        self._costs = pass_costs(actor)
        self._last: Tensor = torch.empty(0, dtype=torch.long, device=self._device)
        self._uniform = torch.empty(slots, settings.max_new, dtype=torch.float64, device=self._device)
        self._rows = torch.arange(slots, device=self._device)
        self._stops: list[int] = []  # end row of each band

    @torch.no_grad()
    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        """Load `sequences` and prefill them under the current weights; returns the number of tokens prefilled.

        The last token of each sequence is the next round's input and is not prefilled. Sequences with a kept cache are skipped.
        Raises ValueError when there are more sequences than slots.
        """
        if len(sequences) > self._uniform.shape[0]:
            raise ValueError(f"{len(sequences)} sequences for {self._uniform.shape[0]} slots")
        if sequences:
            self._weights.refresh()
        sequences = sorted(sequences, key=lambda s: -len(s.prompt) - s.length)
        reused = self._reuse_caches(sequences, version) if self.settings.keeps_cache else self._discard_caches(sequences)
        self.live = sequences
        self.rounds = self.decoded = 0
        tokens = [s.tokens() for s in sequences]
        self._filled = [len(t) - 1 for t in tokens]
        self._stops = self._bands()
        if self.stops is not None:
            self.stops.retain(s.sequence_id for s in sequences)
        self._last = torch.tensor([int(t[-1]) for t in tokens], device=self._device)
        self._draw_uniforms()
        missing = [0 if row in reused else length for row, length in enumerate(self._filled)]
        computed = sum(missing)
        self.budget.run("the actor's prefill", lambda: self._prefill(missing, tokens))
        return computed

    def _prefill(self, missing: list[int], tokens: list[NDArray[np.int64]]) -> None:
        """Prefill rows with `missing` tokens; sets the entry to 0 after each pass, so a retry skips rows that are done."""
        for rows in ragged_batches(missing, self.budget.tokens, None, self._costs):
            padded = to_device(right_padded([tokens[row][:-1] for row in rows]), self._device)
            window = self.cache.fresh_window(to_device(rows, self._device), padded.shape[1])
            hidden = self.actor.hidden(padded, window.positions_NT, window)
            if self.settings.scores_stale_tokens:
                self._score_stale([self.live[row] for row in rows], hidden)
            for row in rows:
                missing[row] = 0

    def _reuse_caches(self, sequences: list[Sequence], version: int) -> set[int]:
        """Move kept caches to their new rows and return those rows; the others get `kept_version = version`."""
        before = {id(sequence): row for row, sequence in enumerate(self.live)}
        rows = [row for row, sequence in enumerate(sequences) if id(sequence) in before]
        if rows:
            sources = [before[id(sequences[row])] for row in rows]
            self.cache.rearrange(sources, rows, max(self._filled[row] for row in sources))
        for row in set(range(len(sequences))) - set(rows):
            sequences[row].kept_version = version
        return set(rows)

    @staticmethod
    def _discard_caches(sequences: list[Sequence]) -> set[int]:
        """Clear `kept_version`: a resumed run may have turned kept caches off."""
        for sequence in sequences:
            sequence.kept_version = None
        return set()

    def save(self, folder: Path) -> None:
        if self.settings.keeps_cache and self.live:
            ids = torch.tensor([s.sequence_id for s in self.live])
            save_weights(self.cache.copied(list(range(len(ids))), max(self._filled)) | {LIVE_KEY: ids}, folder / CACHE_FILE)

    def load(self, folder: Path, sequences: list[Sequence]) -> None:
        if not (folder / CACHE_FILE).exists():
            return
        tensors, known = load_file(folder / CACHE_FILE), {s.sequence_id: s for s in sequences}
        ids = tensors.pop(LIVE_KEY).tolist()
        rows = [row for row, sequence_id in enumerate(ids) if sequence_id in known]
        self.live = [known[ids[row]] for row in rows]
        self._filled = [len(s.prompt) + s.length - 1 for s in self.live]
        self.cache.restore(list(range(len(rows))), {name: tensor[rows] for name, tensor in tensors.items()})

    def _draw_uniforms(self) -> None:
        settings = self.settings
        numbers = [uniforms(settings.seed, s.sequence_id, settings.max_new, settings.use) for s in self.live]
        if numbers:
            self._uniform[: len(numbers)] = to_device(torch.from_numpy(np.stack(numbers)), self._device)

    def _score_stale(self, sequences: list[Sequence], hidden_NTH: Tensor) -> None:
        """Record the log-probs of the response tokens so far under the current weights."""
        for sequence, states in zip(sequences, hidden_NTH, strict=True):
            if not sequence.length:
                continue
            first = len(sequence.prompt) - 1
            logits = precise(self.actor.logits(states[first : first + sequence.length])) / self.settings.temperature
            logits = mask_unsupported(logits, sequence.support)
            tokens = torch.tensor(sequence.response, device=logits.device)[:, None]
            sequence.stale_logprobs = torch.log_softmax(logits, dim=-1).gather(-1, tokens).squeeze(-1).tolist()

    def pause(self) -> None:
        """Free the copies of weights that only decoding uses."""
        self._weights.release()

    def close(self) -> None:
        """No-op: there are no child processes."""

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        for used in range(1, rounds + 1):
            finished = self.round(version)
            if finished:
                return finished, used
        return [], rounds

    @torch.no_grad()
    def round(self, version: int) -> list[Sequence]:
        """Decode one token per live sequence; returns finished sequences in sequence_id order."""
        self.rounds += 1
        self.decoded += len(self.live)
        return self._record(self._sample(), version)

    def _sample(self) -> list[SampledToken]:
        """Sample the next token of every live row with one forward pass."""
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

    def _choose(self, logits_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, list[SampledToken]]:
        """Tokens [N] on the device, and one `SampledToken` per row."""
        if self.settings.filters is None:
            tokens_N, logp_N = sample(logits_NV, uniform_N, self.settings.temperature)
            support: list[Support] = [[]] * len(tokens_N)
        else:
            tokens_N, logp_N, allowed_NV = sample_filtered(logits_NV, uniform_N, self.settings.temperature, self.settings.filters)
            support = [[left] for left in encode_support(allowed_NV)]
        return tokens_N, list(map(SampledToken, tokens_N.tolist(), logp_N.tolist(), support))

    def _record(self, choices: list[SampledToken], version: int) -> list[Sequence]:
        done_rows = []
        for row, (sequence, choice) in enumerate(zip(self.live, choices, strict=True)):
            self._filled[row] += 1
            if self._append(sequence, choice, version):
                done_rows.append(row)
        if not done_rows:
            return []
        done = [self.live[row] for row in done_rows]
        for row in reversed(done_rows):
            self._remove(row)
        self._stops = self._bands()
        return sorted(done, key=lambda s: s.sequence_id)

    def _append(self, sequence: Sequence, choice: SampledToken, version: int) -> bool:
        """Append a token to its sequence; returns whether the sequence is finished."""
        sequence.response.append(choice.token)
        sequence.behaviour_logprobs.append(choice.logprob)
        sequence.support += choice.among
        sequence.token_versions.append(version)
        return self._is_finished(sequence)

    def _is_finished(self, sequence: Sequence) -> bool:
        """Check the stop rules after an appended token and record why the sequence ended."""
        return update_finished(sequence, self.settings.eos, self.settings.max_new, self.stops)

    def _remove(self, row: int) -> None:
        """Fill the hole with the last row of its band, that row's place with the last row of the next band, and so on."""
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
        """End row of each band: rows are cut where the attention cells saved outweigh another attention call."""
        longest = list(accumulate(reversed(self._filled), max))[::-1]
        stops, first = [], 0
        for row in range(1, len(longest)) if self._device.type == "cpu" else ():
            if (longest[first] - longest[row]) * (len(longest) - row) >= BAND_COST_CELLS:
                stops.append(row)
                first = row
        return [*stops, len(longest)]
