"""Decoders whose answers end where the bench says. Every token is still drawn, recorded and scored."""

from __future__ import annotations

from oppo_bench.workload import Lengths
from oppo_core.engine import Engine, slots
from oppo_core.rollout.decoder import Decoder
from oppo_core.rollout.sequence import Sequence


class ImposedDecoder(Decoder):
    """Ends each answer, as if by its end-of-sequence token, at the length imposed on its sequence_id."""

    lengths: Lengths
    ends: dict[int, int]

    def _ends(self, sequence: Sequence, token: int) -> bool:
        end = self.ends.get(sequence.sequence_id)
        if end is None:
            end = self.ends[sequence.sequence_id] = self.lengths.of(sequence.sequence_id)
        sequence.finished = sequence.ended_by_eos = sequence.length >= end
        return sequence.finished


class PaddedDecoder(ImposedDecoder):
    """Rows that have finished stay in the batch until the last one has, as in the `generate` of transformers.

    Only for runs without deferral: all rows begin together.
    """

    def _bands(self) -> list[int]:
        return [len(self._filled)]

    def _record(self, tokens: list[int], logprobs: list[float], version: int) -> list[Sequence]:
        done = []
        for row, (sequence, token, logprob) in enumerate(zip(self.live, tokens, logprobs, strict=True)):
            self._filled[row] += 1
            if sequence.finished:
                self.decoded -= 1  # padding
                continue
            sequence.response.append(token)
            sequence.behaviour_logprobs.append(logprob)
            sequence.token_versions.append(version)
            if self._ends(sequence, token):
                done.append(sequence)
        return sorted(done, key=lambda s: s.sequence_id)


def impose(engine: Engine, lengths: Lengths, kind: type[ImposedDecoder] = ImposedDecoder) -> None:
    """Put a decoder of `kind` in the place of the engine's own, before its first step."""
    own = engine.decoder
    assert isinstance(own, Decoder)
    decoder = kind(own.actor, own.settings, slots(engine.spec), own.drafter)
    decoder.lengths, decoder.ends = lengths, {}
    engine.decoder = decoder


class EndlessDecoder(ImposedDecoder):
    """Never ends an answer: for measuring decoding with every row live."""

    def _ends(self, sequence: Sequence, token: int) -> bool:
        return False
