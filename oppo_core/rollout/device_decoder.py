"""Continuous batching with decode state on the GPU, CUDA graphs, and asynchronous token read-back.

The next round is launched before the tokens of the last one are read on the host. A row that has finished then samples one
surplus token, which is dropped. Tokens depend only on (seed, sequence, position) and the row's own KV cache, so surplus rows
change nothing, and decoding stops at exactly the token at which `Decoder` does.
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

from oppo_core.models.cuda_graphs import CudaGraphs, PassShapes, graphed_if_cuda
from oppo_core.models.host_device import to_device
from oppo_core.models.protocol import Network
from oppo_core.rollout.decoder import Decoder, DecodeSettings, SampledToken
from oppo_core.rollout.sampling import sample
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.stop_conditions import StopConditions

SHAPES = PassShapes((1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256), column_step=128)
# The round being read, the one in flight, and one spare.
HOST_BUFFERS = 3
TOKEN, LOGPROB = 0, 1
LAST, FILLED, LENGTH = 0, 1, 2


def build_decoder(actor: Network, settings: DecodeSettings, slots: int, stops: StopConditions | None = None) -> Decoder:
    """A `DeviceDecoder` on a GPU; a `Decoder` on a CPU or with sampling filters, which need the host at every token."""
    on_host = settings.filters is not None or next(actor.parameters()).device.type != "cuda"
    return (Decoder if on_host else DeviceDecoder)(actor, settings, slots, stops)


class HostCopy:
    """Host buffer for a round's tokens and log-probs [2, slots]; pinned memory with a GPU."""

    def __init__(self, drawn: Tensor) -> None:
        on_gpu = drawn.device.type == "cuda"
        self._values = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=on_gpu)
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def start(self, drawn: Tensor) -> None:
        """Queue the device-to-host copy behind the round that was queued last."""
        self._values.copy_(drawn, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self, rows: int) -> tuple[list[float], list[float]]:
        """Tokens and log-probs of the first `rows` rows. Waits for that round only."""
        if self._event is not None:
            self._event.synchronize()
        tokens, logprobs = self._values[:, :rows].tolist()
        return tokens, logprobs


@dataclass(frozen=True, slots=True)
class PendingRound:
    """A launched round: the sequences in its rows, and the buffer that receives its result."""

    sequences: list[Sequence]
    result: HostCopy


class DeviceDecoder(Decoder):
    """A `Decoder` with one launch per round. Finished rows idle until a smaller round shape suffices.

    Raises ValueError for sampling filters, which need the host before each round.
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
        self._launch_round = graphed_if_cuda(self._advance_rows, self._state, actor)
        self._buffers = deque(HostCopy(self._drawn) for _ in range(HOST_BUFFERS))
        self._pending: deque[PendingRound] = deque()
        self._width = 0  # rows per round
        self._occupants: list[Sequence] = []  # current or last sequence of each row; replaced, never mutated
        self._places: list[int] = []  # the row of each live sequence
        self._stream = _priority_stream(self._device)

    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        """See `Decoder.begin`. Drops the surplus round."""
        with self._stream():
            self._close_holes()
            computed = super().begin(sequences, version)
            self._upload_state()
        return computed

    def load(self, folder: Path, sequences: list[Sequence]) -> None:
        with self._stream():
            super().load(folder, sequences)
        self._places = list(range(len(self.live)))

    def save(self, folder: Path) -> None:
        with self._stream():
            self._close_holes()
            super().save(folder)

    @torch.no_grad()
    def round(self, version: int) -> list[Sequence]:
        self.rounds += 1
        self.decoded += len(self.live)
        with self._stream():
            while len(self._pending) < 2:
                self._launch()
            pending = self._pending.popleft()
            done = self._collect(pending, version)
            if done and SHAPES.rows_for(len(self.live), self.cache.slots) < self._width:
                self._close_holes()
        return done

    def _upload_state(self) -> None:
        """Copy the state of the live rows to the device, as input of the next round."""
        self._pending.clear()
        known = np.zeros((3, self.cache.slots), dtype=np.int64)
        for row, (sequence, filled) in enumerate(zip(self.live, self._filled, strict=True)):
            known[:, row] = _last_token(sequence), filled, sequence.length
        self._state.copy_(to_device(known, self._device))
        self._occupants, self._places = list(self.live), list(range(len(self.live)))
        self._width = SHAPES.rows_for(len(self.live), self.cache.slots)
        if isinstance(self._launch_round, CudaGraphs):
            self._launch_round.refresh()

    def _launch(self) -> None:
        """Queue a round and the copy of its samples."""
        longest = max(self._filled, default=0) + len(self._pending) + 1
        self._launch_round(self._width, SHAPES.columns_for(longest, self.cache.columns))
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        buffer.start(self._drawn)
        self._pending.append(PendingRound(self._occupants, buffer))

    def _advance_rows(self, rows: int, columns: int) -> None:
        """One round on the device, which updates `_state` and `_drawn` in place without synchronizing.

        A row at the length limit stays there. A row that ended otherwise keeps decoding until its slot is reused.
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

    def _collect(self, pending: PendingRound, version: int) -> list[Sequence]:
        """Append a round's tokens to unfinished sequences; returns those that finish, in sequence_id order."""
        tokens, logprobs = pending.result.read(len(pending.sequences))
        done = []
        for sequence, token, logprob in zip(pending.sequences, tokens, logprobs, strict=True):
            if not sequence.finished and self._append(sequence, SampledToken(int(token), logprob, []), version):
                done.append(sequence)
        self._filled = [filled + 1 for filled in self._filled]
        if done:
            rows = [n for n, sequence in enumerate(self.live) if not sequence.finished]
            self.live, self._filled, self._places = (
                [self.live[n] for n in rows], [self._filled[n] for n in rows], [self._places[n] for n in rows],
            )  # fmt: skip
        return sorted(done, key=lambda s: s.sequence_id)

    def _close_holes(self) -> None:
        """Move the live rows to the first slots and shrink the round to their shape."""
        count = len(self.live)
        holes = sorted(set(range(count)) - set(self._places))
        beyond = [place for place in self._places if place >= count]
        if beyond:
            self.cache.rearrange(beyond, holes, max(self._filled) + len(self._pending))
            sources, targets = to_device(beyond, self._device), to_device(holes, self._device)
            self._state[:, targets] = self._state[:, sources]
            self._uniform[targets] = self._uniform[sources]
        moved = dict(zip(beyond, holes, strict=True))
        self._places = [moved.get(place, place) for place in self._places]
        order = sorted(range(count), key=self._places.__getitem__)
        self.live, self._filled = [self.live[n] for n in order], [self._filled[n] for n in order]
        self._occupants, self._places = list(self.live), list(range(count))
        self._width = SHAPES.rows_for(count, self.cache.slots)


def _last_token(sequence: Sequence) -> int:
    """Input of the next round."""
    return int(sequence.tokens_from(len(sequence.prompt) + sequence.length - 1)[0])


def _priority_stream(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A context manager that launches on a high-priority stream, ordered after and before work on the current stream."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def entered() -> Iterator[None]:
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    return entered
