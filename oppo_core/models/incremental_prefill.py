"""Incremental (chunked) prefill of growing sequences with a KV cache: each token is processed once.

Intra-step overlap (arXiv 2509.25762, §3.1): a prefilled chunk stays in the KV cache and is not recomputed. Pass composition
depends only on the sequences given and their lengths, never on arrival times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.cache import Band, CacheWindow, SlotCache
from oppo_core.models.graphed_reads import GraphedReads
from oppo_core.models.host_device import to_device
from oppo_core.models.microbatching import pass_costs, ragged_batches, right_padded
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network


@dataclass(frozen=True, slots=True)
class NewStates:
    """New hidden states of one sequence.

    `hidden` [K, H] are the states at positions `first` … `first`+K−1. For a continued sequence they start with the last state
    of the earlier part, which predicts the first new token.
    """

    first: int
    hidden: Tensor


class IncrementalPrefill:
    """One network, its slot KV cache, and the number of tokens prefilled per sequence."""

    def __init__(self, network: Network, slots: int, columns: int, budget: PassBudget) -> None:
        self.network = network
        self.budget = budget
        self.columns = columns
        # One column more than the longest sequence: padding past the end is written there.
        weight = next(network.parameters())
        self.device = weight.device
        self._costs = pass_costs(network)
        self._by_row = network.attends_by_band and weight.device.type == "cpu"
        graphed = slots > 0 and weight.device.type == "cuda"
        self._cache = SlotCache(network.cache_shape, slots + graphed, columns + 1, weight)
        self._graphed = GraphedReads(network, self._cache, weight.device) if graphed else None
        self._free = list(range(slots))[::-1]
        self._slot: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._last: dict[int, Tensor] = {}

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence's KV cache; the next read starts at its first token."""
        self._read.pop(sequence_id, None)
        self._release(sequence_id)

    def _release(self, sequence_id: int) -> None:
        self._last.pop(sequence_id, None)
        if sequence_id in self._slot:
            self._free.append(self._slot.pop(sequence_id))

    @torch.no_grad()
    def read(self, tokens: dict[int, NDArray[np.int64]], finished: set[int]) -> dict[int, NewStates]:
        """Prefill the new tokens of each sequence; `tokens` holds whole sequences, prompt first. Finished ones free their slot.

        Returns:
            `NewStates` for every sequence with new tokens.

        Raises:
            MemoryShortError: out of memory even with one row per pass.
        """
        states: dict[int, NewStates] = {}
        if self._graphed is not None:
            self._graphed.refresh()
        self.budget.run("the scorers' reading", lambda: self._read_remaining(tokens, finished, states))
        for sequence_id in finished:
            self._release(sequence_id)
        return states

    def _read_remaining(self, tokens: dict[int, NDArray[np.int64]], finished: set[int], states: dict[int, NewStates]) -> None:
        """Add to `states` pass by pass; after an out-of-memory error a retry continues behind the last complete pass."""
        ids = sorted(i for i in tokens if len(tokens[i]) > self._read.get(i, 0))
        whole = [i for i in ids if i in finished and not self._read.get(i)]
        growing = [i for i in ids if not (i in finished and not self._read.get(i))]
        self._read_whole(whole, tokens, states)
        self._read_growing(growing, tokens, states)

    def _read_whole(self, ids: list[int], tokens: dict[int, NDArray[np.int64]], states: dict[int, NewStates]) -> None:
        for rows in ragged_batches([len(tokens[i]) for i in ids], self.budget.tokens, None, self._costs):
            self.budget.alive()
            padded = to_device(right_padded([tokens[ids[row]] for row in rows]), self.device)
            hidden = self.network.hidden(padded, torch.arange(padded.shape[1], device=self.device).expand_as(padded))
            for row, hidden_TH in zip(rows, hidden, strict=True):
                length = self._read[ids[row]] = len(tokens[ids[row]])
                states[ids[row]] = NewStates(0, hidden_TH[:length])

    def _read_growing(self, ids: list[int], tokens: dict[int, NDArray[np.int64]], states: dict[int, NewStates]) -> None:
        starts = [self._read.get(i, 0) for i in ids]
        new = [tokens[i][start:] for i, start in zip(ids, starts, strict=True)]
        # New sequences need no mask, so they are not batched with continued ones.
        for chosen in ([row for row in range(len(ids)) if starts[row] == 0], [row for row in range(len(ids)) if starts[row] > 0]):
            lengths, columns = [len(new[row]) for row in chosen], [len(tokens[ids[row]]) for row in chosen]
            for group in ragged_batches(lengths, self.budget.tokens, lengths if self._by_row else columns, self._costs):
                self.budget.alive()
                rows = [chosen[position] for position in group]
                hidden = self._pass([ids[row] for row in rows], [starts[row] for row in rows], [new[row] for row in rows])
                for row, hidden_TH in zip(rows, hidden, strict=True):
                    states[ids[row]] = self._record(ids[row], starts[row], hidden_TH[: len(new[row])])

    def _pass(self, ids: list[int], starts: list[int], new: list[NDArray[np.int64]]) -> Tensor:
        """Hidden states [N, T, H], right-padded, of the `new` tokens of sequences that are all new or all continued."""
        slots, longest = [self._slot_of(i) for i in ids], max(map(len, new))
        if self._graphed is not None and starts[0]:
            padded_tokens = self._graphed.padded_tokens(new)
            if padded_tokens is not None and padded_tokens <= self.budget.tokens:
                return self._graphed.read(slots, starts, new)
        # Padding writes entries that are overwritten before they are read, or goes to the spare column. Computed on the host:
        # reading a maximum from the GPU would synchronize with everything queued there.
        places = np.minimum(np.asarray(starts)[:, None] + np.arange(longest), self.columns)
        window = self._window(to_device(slots, self.device), places)
        padded = to_device(right_padded(new), self.device)
        return self.network.hidden(padded, window.positions_NT.clamp_max(self.columns - 1), window)

    def _window(self, slots_N: Tensor, places: NDArray[np.int64]) -> CacheWindow:
        if not places[0, 0]:
            return self._cache.fresh_window(slots_N, places.shape[1])
        last = places[:, -1].tolist()
        # A band of one row is a view of its slot: no keys are copied, and no row attends to columns of a longer one.
        bands = tuple(Band(row, row + 1, place + 1) for row, place in enumerate(last)) if self._by_row else ()
        return self._cache.window(slots_N, to_device(places, self.device), max(last) + 1, bands)

    def _record(self, sequence_id: int, start: int, states: Tensor) -> NewStates:
        previous, last = self._last.get(sequence_id), states[-1].clone()
        new = NewStates(0, states) if previous is None else NewStates(start - 1, torch.cat([previous[None], states]))
        self._read[sequence_id], self._last[sequence_id] = start + len(states), last
        return new

    def _slot_of(self, sequence_id: int) -> int:
        if sequence_id not in self._slot:
            self._slot[sequence_id] = self._free.pop()
        return self._slot[sequence_id]
