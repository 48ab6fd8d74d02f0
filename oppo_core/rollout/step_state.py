"""A step in the making: what decoding has given so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from oppo_core.rollout.sequence import Sequence


@dataclass(slots=True)
class Batch:
    """`finishers` of this step in order of (decode round, sequence_id), after `chunk` chunks; when complete, `sequences`.

    `ends`: when each finisher finished, by sequence_id; `decode`: from when to when the step decoded. Both in seconds of the
    engine's clock; of a step that was resumed half-way they cover the last attempt's part.

    `interrupted`: the step comes from a checkpoint, after `rounds` rounds with `decoded` tokens, and its caches are still empty.
    """

    finishers: list[Sequence] = field(default_factory=list)
    chunk: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)
    decode: tuple[float, float] = (0.0, 0.0)
    interrupted: bool = False
    rounds: int = 0
    decoded: int = 0
