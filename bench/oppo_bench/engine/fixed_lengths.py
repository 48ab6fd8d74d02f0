"""Decoders whose answers end where the bench says. Every token is still drawn, recorded and scored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from oppo_bench.engine.workload import Lengths
from oppo_core.engine.build import slots
from oppo_core.engine.state import Engine
from oppo_core.rollout.decoder import Decoder
from oppo_core.rollout.device_decoder import DeviceDecoder
from oppo_core.rollout.sequence import Sequence

PADDING = -1  # sequence_id of a row that has finished


class ImposedDecoder(Decoder):
    """Ends each answer, as if by its end-of-sequence token, at the length imposed on its sequence_id."""

    lengths: Lengths
    ends: dict[int, int]

    def _is_finished(self, sequence: Sequence) -> bool:
        end = self.ends.get(sequence.sequence_id)
        if end is None:
            end = self.ends[sequence.sequence_id] = self.lengths.of(sequence.sequence_id)
        sequence.finished = sequence.ended_by_eos = sequence.length >= end
        return sequence.finished


class PaddedDecoder(ImposedDecoder):
    """Rows that have finished stay in the batch until the last one has, as in the `generate` of transformers.

    Only for runs without deferral: all rows begin together.
    """

    def round(self, version: int) -> list[Sequence]:
        """See `Decoder.round`; padding is not counted among the tokens decoded."""
        padding = sum(s.sequence_id == PADDING for s in self.live)
        done = super().round(version)
        self.decoded -= padding
        return done

    def _is_finished(self, sequence: Sequence) -> bool:
        return sequence.sequence_id != PADDING and super()._is_finished(sequence)

    def _remove(self, row: int) -> None:
        """The row goes on, and nobody reads what it writes."""
        left = self.live[row]
        self.live[row] = Sequence(PADDING, left.prompt_index, left.prompt)

    def _bands(self) -> list[int]:
        return [len(self._filled)]


class EndlessDecoder(ImposedDecoder):
    """Never ends an answer: for measuring decoding with every row live."""

    def _is_finished(self, sequence: Sequence) -> bool:
        return False


class ImposedDeviceDecoder(ImposedDecoder, DeviceDecoder):
    """The same with its state on the device."""


class PaddedDeviceDecoder(ImposedDeviceDecoder):
    """Rounds stay as wide as they began: rows that have finished idle to the end."""

    def _close_holes(self) -> None:
        if not self.live:
            super()._close_holes()


class EndlessDeviceDecoder(EndlessDecoder, ImposedDeviceDecoder):
    """The same with its state on the device."""


def impose(engine: Engine, lengths: Lengths, kind: type[ImposedDecoder] = ImposedDecoder) -> ImposedDecoder:
    """Put a decoder of `kind` in the place of the engine's own, before its first step, and return it.

    It decodes as the one that the engine has chosen for its device.
    """
    own = engine.decoder
    assert isinstance(own, Decoder)
    decoder = _imposed(kind, type(own))(own.actor, own.settings, slots(engine.spec))
    decoder.lengths, decoder.ends = lengths, {}
    engine.decoder = decoder
    return decoder


def _imposed(kind: type[ImposedDecoder], own: type[Decoder]) -> type[ImposedDecoder]:
    if not issubclass(own, DeviceDecoder) or issubclass(own, ImposedDecoder):
        return kind
    return {PaddedDecoder: PaddedDeviceDecoder, EndlessDecoder: EndlessDeviceDecoder}.get(kind, ImposedDeviceDecoder)


class ImposedStops:
    """Ends each answer at the length imposed on it, where a decoder asks for stop conditions."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths

    def reached(self, sequence: Sequence) -> bool:
        """Whether the answer is as long as it shall be."""
        return sequence.length >= self.lengths.of(sequence.sequence_id)

    def retain(self, sequence_ids: Iterable[int]) -> None:
        """Nothing is remembered."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is remembered."""


def impose_on_vllm(engine: Engine, lengths: Lengths) -> None:
    """Impose the lengths on a decoder that has its engine from somebody else; its own ends stay besides."""
    decoder: Any = engine.decoder
    decoder._stops = ImposedStops(lengths)
