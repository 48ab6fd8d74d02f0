"""Continuous batching whose state lives on the device, so that the host never stands between two rounds.

The next round is launched before the last one's tokens are looked at. A row that turns out to have ended has then drawn one
token too many, which nobody reads: tokens depend on (seed, sequence, position) and on the row's own keys and values only, so
whatever a round computes beside does not matter. Decoding still stops at the very token at which `Decoder` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oppo_core.models.host_device import to_device
from oppo_core.models.protocol import Network
from oppo_core.rollout.cuda_graphs import Graphs, round_of
from oppo_core.rollout.decoder import Choice, Decoder, DecodeSettings
from oppo_core.rollout.sampling import sample
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.stop_conditions import StopConditions

# Rounds are of few shapes, because each is captured once: so many rows, and multiples of so many columns.
ROW_SHAPES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
COLUMN_STEP = 128
# A round that is looked at, the one after it, and one to spare.
LANDINGS = 3
TOKEN, LOGPROB = 0, 1
LAST, FILLED, LENGTH = 0, 1, 2


def decoder_of(actor: Network, settings: DecodeSettings, slots: int, stops: StopConditions | None = None) -> Decoder:
    """A `DeviceDecoder` on a GPU; a `Decoder` on a CPU, and with sampling filters, whose choice the host records each token."""
    on_host = settings.filters is not None or next(actor.parameters()).device.type != "cuda"
    return (Decoder if on_host else DeviceDecoder)(actor, settings, slots, stops)


class Landing:
    """Where tokens and log-probs [2, slots] of a round arrive on the host, pinned where there is a GPU."""

    def __init__(self, drawn: Tensor) -> None:
        on_gpu = drawn.device.type == "cuda"
        self._values = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=on_gpu)
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def expect(self, drawn: Tensor) -> None:
        """Queue the copy of what the round queued last will have drawn."""
        self._values.copy_(drawn, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self, rows: int) -> tuple[list[float], list[float]]:
        """Tokens and log-probs of the first `rows` rows. Waits for that round alone: the one finish check."""
        if self._event is not None:
            self._event.synchronize()
        tokens, logprobs = self._values[:, :rows].tolist()
        return tokens, logprobs


@dataclass(frozen=True, slots=True)
class Flight:
    """A round that is launched: who was in its rows, and where its outcome will be."""

    sequences: list[Sequence]
    landing: Landing


class DeviceDecoder(Decoder):
    """A `Decoder` of one launch a round. Rows that have ended idle until enough have for a smaller round.

    Raises ValueError for filters, which need the host before each round.
    """

    def __init__(
        self,
        actor: Network,
        settings: DecodeSettings,
        slots: int,
        stops: StopConditions | None = None,
    ) -> None:
        if settings.filters is not None:
            raise ValueError("sampling filters need the host before each round; take a Decoder")
        super().__init__(actor, settings, slots, stops)
        self._state = torch.zeros(3, slots, dtype=torch.long, device=self._device)
        self._drawn = torch.zeros(2, slots, dtype=torch.float64, device=self._device)
        self._launch_round = round_of(self._advance_rows, self._state)
        self._weights: list[int] = []  # where they lie
        self._landings = deque(Landing(self._drawn) for _ in range(LANDINGS))
        self._flights: deque[Flight] = deque()
        self._width = 0  # rows of a round
        self._occupants: list[Sequence] = []  # who is, or was, in each row; replaced, never changed
        self._places: list[int] = []  # the row of each live sequence
        self._aside = _urgent(self._device)

    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        """See `Decoder.begin`. A round that was launched too many is forgotten."""
        with self._aside():
            self._close_holes()
            computed = super().begin(sequences, version)
            self._take_places()
        return computed

    def load(self, folder: Path, sequences: list[Sequence]) -> None:
        """See `Decoding.load`."""
        with self._aside():
            super().load(folder, sequences)
        self._places = list(range(len(self.live)))

    def save(self, folder: Path) -> None:
        """See `Decoding.save`."""
        with self._aside():
            self._close_holes()
            super().save(folder)

    @torch.no_grad()
    def round(self, version: int) -> list[Sequence]:
        """See `Decoder.round`."""
        self.rounds += 1
        self.decoded += len(self.live)
        with self._aside():
            while len(self._flights) < 2:
                self._launch()
            flight = self._flights.popleft()
            done = self._land(flight, version)
            if done and _rows_for(len(self.live), self.cache.slots) < self._width:
                self._close_holes()
        return done

    def _take_places(self) -> None:
        """Put what the host knows of the live rows on the device: the next round begins there."""
        self._flights.clear()
        known = np.zeros((3, self.cache.slots), dtype=np.int64)
        for row, (sequence, filled) in enumerate(zip(self.live, self._filled, strict=True)):
            known[:, row] = _last_token(sequence), filled, sequence.length
        self._state.copy_(to_device(known, self._device))
        self._occupants, self._places = list(self.live), list(range(len(self.live)))
        self._width = _rows_for(len(self.live), self.cache.slots)
        weights = [weight.data_ptr() for weight in self.actor.parameters()]
        if weights != self._weights and isinstance(self._launch_round, Graphs):
            self._launch_round.forget()
        self._weights = weights

    def _launch(self) -> None:
        """Queue a round, and the copy of what it draws."""
        longest = max(self._filled, default=0) + len(self._flights) + 1
        columns = min(-(-longest // COLUMN_STEP) * COLUMN_STEP, self.cache.columns)
        self._launch_round(self._width, columns)
        landing = self._landings[0]
        self._landings.rotate(-1)
        landing.expect(self._drawn)
        self._flights.append(Flight(self._occupants, landing))

    def _advance_rows(self, rows: int, columns: int) -> None:
        """A round on the device, from `_state` to `_state` and `_drawn`. Asks the device for nothing.

        A row at the length limit stays where it is. One that ended otherwise goes on until its place is taken.
        """
        last_N, filled_N, length_N = self._state[:, :rows]
        window = self.cache.window(slice(0, rows), filled_N[:, None], columns)
        hidden_N1H = self.actor.hidden(last_N[:, None], filled_N[:, None], window)
        offsets_N1 = length_N[:, None].clamp_max(self.settings.max_new - 1)
        uniform_N = self._uniform[:rows].gather(1, offsets_N1).squeeze(1)
        tokens_N, logp_N = sample(self.actor.logits(hidden_N1H[:, 0]), uniform_N, self.settings.temperature)
        self._drawn[TOKEN, :rows] = tokens_N
        self._drawn[LOGPROB, :rows] = logp_N
        grows_N = (length_N < self.settings.max_new).long()
        last_N.copy_(tokens_N)
        filled_N.add_(grows_N).clamp_(max=self.cache.columns - 1)
        length_N.add_(grows_N)

    def _land(self, flight: Flight, version: int) -> list[Sequence]:
        """Note what a round has drawn for those who had not ended before; returns who has now, in sequence_id order."""
        tokens, logprobs = flight.landing.read(len(flight.sequences))
        done = []
        for sequence, token, logprob in zip(flight.sequences, tokens, logprobs, strict=True):
            if not sequence.finished and self._note(sequence, Choice(int(token), logprob, []), version):
                done.append(sequence)
        self._filled = [filled + 1 for filled in self._filled]
        if done:
            rows = [n for n, sequence in enumerate(self.live) if not sequence.finished]
            self.live, self._filled, self._places = (
                [self.live[n] for n in rows], [self._filled[n] for n in rows], [self._places[n] for n in rows],
            )  # fmt: skip
        return sorted(done, key=lambda s: s.sequence_id)

    def _close_holes(self) -> None:
        """Bring the live rows to the first slots; rounds are of as many rows as these need from now on."""
        count = len(self.live)
        holes = sorted(set(range(count)) - set(self._places))
        beyond = [place for place in self._places if place >= count]
        if beyond:
            self.cache.rearrange(beyond, holes, max(self._filled) + len(self._flights))
            sources, targets = to_device(beyond, self._device), to_device(holes, self._device)
            self._state[:, targets] = self._state[:, sources]
            self._uniform[targets] = self._uniform[sources]
        moved = dict(zip(beyond, holes, strict=True))
        self._places = [moved.get(place, place) for place in self._places]
        order = sorted(range(count), key=self._places.__getitem__)
        self.live, self._filled = [self.live[n] for n in order], [self._filled[n] for n in order]
        self._occupants, self._places = list(self.live), list(range(count))
        self._width = _rows_for(count, self.cache.slots)


def _last_token(sequence: Sequence) -> int:
    """The next round's input."""
    return int(sequence.tokens_from(len(sequence.prompt) + sequence.length - 1)[0])


def _rows_for(count: int, slots: int) -> int:
    """The least shape that holds `count` rows."""
    return min(next((rows for rows in ROW_SHAPES if rows >= count), slots), slots)


def _urgent(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Entered: what is launched goes to a stream whose kernels run before those of others, in its turn with the present one."""
    if device.type != "cuda":
        return nullcontext
    urgent = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def aside() -> Iterator[None]:
        present = torch.cuda.current_stream(device)
        urgent.wait_stream(present)
        with torch.cuda.stream(urgent):
            yield
        present.wait_stream(urgent)

    return aside
