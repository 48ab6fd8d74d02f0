"""When an answer is finished: the same rule for every decoder."""

from __future__ import annotations

from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.stop_conditions import StopConditions


def ends(sequence: Sequence, eos: int, max_new: int, stops: StopConditions | None) -> bool:
    """Whether the last token of `sequence` is its last one; notes in it why."""
    sequence.ended_by_eos = sequence.response[-1] == eos
    if stops is not None and not sequence.ended_by_eos:
        sequence.stopped = sequence.ended_by_eos = stops.reached(sequence)
    sequence.finished = sequence.ended_by_eos or sequence.length == max_new
    if stops is not None and sequence.finished:
        stops.forget(sequence.sequence_id)
    return sequence.finished
