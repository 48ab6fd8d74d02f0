"""Decoders with fixed answer lengths. Every token is still sampled, recorded and scored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from oppo_bench.engine.workload import Lengths
from oppo_core.engine.state import Engine
from oppo_core.rollout.decoder import Decoder
from oppo_core.rollout.device_decoder import DeviceDecoder
from oppo_core.rollout.sequence import Sequence
from oppo_estimate.memory import decode_slots

PADDING = -1  # sequence_id of a finished row


class FixedLengthDecoder(Decoder):
    """Ends each answer, as if by EOS, at the length fixed for its sequence_id."""

    lengths: Lengths
    ends: dict[int, int]

    def _is_finished(self, sequence: Sequence) -> bool:
        end = self.ends.get(sequence.sequence_id)
        if end is None:
            end = self.ends[sequence.sequence_id] = self.lengths.of(sequence.sequence_id)
        sequence.finished = sequence.ended_by_eos = sequence.length >= end
        return sequence.finished


class PaddedDecoder(FixedLengthDecoder):
    """Finished rows stay in the batch until the last one finishes, as in `generate` of transformers.

    Only for runs without deferral: all rows start together.
    """

    def round(self, version: int) -> list[Sequence]:
        """Like `Decoder.round`; padding does not count as decoded tokens."""
        padding = sum(s.sequence_id == PADDING for s in self.live)
        done = super().round(version)
        self.decoded -= padding
        return done

    def _is_finished(self, sequence: Sequence) -> bool:
        return sequence.sequence_id != PADDING and super()._is_finished(sequence)

    def _remove(self, row: int) -> None:
        """Keep the row in the batch as padding."""
        left = self.live[row]
        self.live[row] = Sequence(PADDING, left.prompt_index, left.prompt)

    def _bands(self) -> list[int]:
        return [len(self._filled)]


class EndlessDecoder(FixedLengthDecoder):
    """Never ends an answer: to measure decoding with every row live."""

    def _is_finished(self, sequence: Sequence) -> bool:
        return False


class FixedLengthDeviceDecoder(FixedLengthDecoder, DeviceDecoder):
    """The same with device-resident state."""


class PaddedDeviceDecoder(FixedLengthDeviceDecoder):
    """The batch keeps its width: finished rows stay until the end."""

    def _close_holes(self) -> None:
        if not self.live:
            super()._close_holes()


class EndlessDeviceDecoder(EndlessDecoder, FixedLengthDeviceDecoder):
    """The same with device-resident state."""


def fix_lengths(engine: Engine, lengths: Lengths, kind: type[FixedLengthDecoder] = FixedLengthDecoder) -> FixedLengthDecoder:
    """Replace the engine's decoder by one of `kind` before its first step, and return it.

    It uses the kernels that the engine chose for its device.
    """
    own = engine.decoder
    assert isinstance(own, Decoder)
    decoder = _decoder_class(kind, type(own))(own.actor, own.settings, decode_slots(engine.spec))
    decoder.lengths, decoder.ends = lengths, {}
    engine.decoder = decoder
    return decoder


def _decoder_class(kind: type[FixedLengthDecoder], own: type[Decoder]) -> type[FixedLengthDecoder]:
    if not issubclass(own, DeviceDecoder) or issubclass(own, FixedLengthDecoder):
        return kind
    return {PaddedDecoder: PaddedDeviceDecoder, EndlessDecoder: EndlessDeviceDecoder}.get(kind, FixedLengthDeviceDecoder)


class FixedLengthStops:
    """Stop conditions that end each answer at its fixed length."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths

    def reached(self, sequence: Sequence) -> bool:
        """Whether the answer has its fixed length."""
        return sequence.length >= self.lengths.of(sequence.sequence_id)

    def retain(self, sequence_ids: Iterable[int]) -> None:
        pass

    def forget(self, sequence_id: int) -> None:
        pass


def fix_vllm_lengths(engine: Engine, lengths: Lengths) -> None:
    """Fix the lengths of a vLLM decoder, in addition to its own stop conditions."""
    decoder: Any = engine.decoder
    decoder._stops = FixedLengthStops(lengths)
