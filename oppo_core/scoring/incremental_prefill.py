"""A network that reads growing sequences, each token once.

Intra-step overlap (arXiv 2509.25762, §3.1): the prefill of a chunk costs the scorer nothing later, because its keys and
values stay. Batches depend on the sequences given and their lengths alone, never on when they arrived.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.cache import Band, CacheWindow, SlotCache
from oppo_core.models.host_device import to_device
from oppo_core.models.protocol import Network
from oppo_core.ppo.microbatching import pass_costs, ragged_batches, right_padded
from oppo_core.ppo.oom_retry import PassBudget


@dataclass(frozen=True, slots=True)
class Reading:
    """What one network has newly read of one sequence.

    `hidden` [K, H] are the states at positions `first` … `first`+K−1. When the sequence was begun before, the last state
    of the earlier part comes first, because it predicts the first new token.
    """

    first: int
    hidden: Tensor


class Stream:
    """One network, a slot cache, and how far each sequence has been read."""

    def __init__(self, network: Network, slots: int, columns: int, budget: PassBudget) -> None:
        self.network = network
        self.budget = budget
        self.columns = columns
        # One column more than the longest sequence: padding that would point past the end is written there.
        weight = next(network.parameters())
        self.device = weight.device
        self._costs = pass_costs(network)
        self._by_row = network.attends_by_band and weight.device.type == "cpu"
        self._cache = SlotCache(network.cache_shape, slots, columns + 1, weight)
        self._free = list(range(slots))[::-1]
        self._slot: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._last: dict[int, Tensor] = {}

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence's keys and values; reading it again starts at its first token."""
        self._read.pop(sequence_id, None)
        self._release(sequence_id)

    def _release(self, sequence_id: int) -> None:
        self._last.pop(sequence_id, None)
        if sequence_id in self._slot:
            self._free.append(self._slot.pop(sequence_id))

    @torch.no_grad()
    def read(self, tokens: dict[int, NDArray[np.int64]], finished: set[int]) -> dict[int, Reading]:
        """Read what is new of each sequence; `tokens` holds whole sequences, prompt first. Finished ones leave the cache.

        Returns:
            A `Reading` for every sequence that had something new.

        Raises:
            MemoryShortError: memory does not suffice, not even row by row.
        """
        readings: dict[int, Reading] = {}
        self.budget.shrinking("the scorers' reading", lambda: self._read_rest(tokens, finished, readings))
        for sequence_id in finished:
            self._release(sequence_id)
        return readings

    def _read_rest(self, tokens: dict[int, NDArray[np.int64]], finished: set[int], readings: dict[int, Reading]) -> None:
        """Add to `readings` pass by pass. Whatever a pass has read is noted, and not read again when a later one fails."""
        ids = sorted(i for i in tokens if len(tokens[i]) > self._read.get(i, 0))
        whole = [i for i in ids if i in finished and not self._read.get(i)]
        grown = [i for i in ids if not (i in finished and not self._read.get(i))]
        self._read_whole(whole, tokens, readings)
        self._read_on(grown, tokens, readings)

    def _read_whole(self, ids: list[int], tokens: dict[int, NDArray[np.int64]], readings: dict[int, Reading]) -> None:
        for rows in ragged_batches([len(tokens[i]) for i in ids], self.budget.tokens, None, self._costs):
            self.budget.alive()
            padded = to_device(right_padded([tokens[ids[row]] for row in rows]), self.device)
            hidden = self.network.hidden(padded, torch.arange(padded.shape[1], device=self.device).expand_as(padded))
            for row, states in zip(rows, hidden, strict=True):
                length = self._read[ids[row]] = len(tokens[ids[row]])
                readings[ids[row]] = Reading(0, states[:length])

    def _read_on(self, ids: list[int], tokens: dict[int, NDArray[np.int64]], readings: dict[int, Reading]) -> None:
        starts = [self._read.get(i, 0) for i in ids]
        new = [tokens[i][start:] for i, start in zip(ids, starts, strict=True)]
        # Sequences that begin need no mask, so they are not mixed with those that go on.
        for chosen in ([row for row in range(len(ids)) if starts[row] == 0], [row for row in range(len(ids)) if starts[row] > 0]):
            lengths, columns = [len(new[row]) for row in chosen], [len(tokens[ids[row]]) for row in chosen]
            for group in ragged_batches(lengths, self.budget.tokens, lengths if self._by_row else columns, self._costs):
                self.budget.alive()
                rows = [chosen[position] for position in group]
                padded = to_device(right_padded([new[row] for row in rows]), self.device)
                window = self._window([ids[row] for row in rows], [starts[row] for row in rows], padded.shape[1])
                hidden = self.network.hidden(padded, window.positions_NT.clamp_max(self.columns - 1), window)
                for row, states in zip(rows, hidden, strict=True):
                    readings[ids[row]] = self._note(ids[row], starts[row], states[: len(new[row])])

    def _window(self, ids: list[int], starts: list[int], width: int) -> CacheWindow:
        slots = to_device([self._slot_of(i) for i in ids], self.device)
        if not starts[0]:
            return self._cache.fresh_window(slots, width)
        # What padding writes is overwritten before anyone may look, or lies in the spare column, where nobody looks. All on the
        # host, which knows it: asking a GPU for the last place would wait for everything that is queued there.
        places = np.minimum(np.asarray(starts)[:, None] + np.arange(width), self.columns)
        last = places[:, -1].tolist()
        # A band of one row is a view of its slot: no keys are copied, and no row looks at the columns of a longer one.
        bands = tuple(Band(row, row + 1, place + 1) for row, place in enumerate(last)) if self._by_row else ()
        return self._cache.window(slots, to_device(places, self.device), max(last) + 1, bands)

    def _note(self, sequence_id: int, start: int, states: Tensor) -> Reading:
        before, last = self._last.get(sequence_id), states[-1].clone()
        reading = Reading(0, states) if before is None else Reading(start - 1, torch.cat([before[None], states]))
        self._read[sequence_id], self._last[sequence_id] = start + len(states), last
        return reading

    def _slot_of(self, sequence_id: int) -> int:
        if sequence_id not in self._slot:
            self._slot[sequence_id] = self._free.pop()
        return self._slot[sequence_id]
