"""State of the PPO step in progress, kept in checkpoints taken between chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

from oppo_core.rollout.sequence import Sequence


@dataclass(slots=True)
class StepState:
    """`finishers` so far in order of (decode step, sequence_id), after `chunk` chunks; `sequences` is the complete batch.

    `ends`: finish time by sequence_id; `decode`: start and end of decoding. Both in seconds of the engine's clock; in a step
    resumed half-way they cover the last attempt only.

    Dynamic sampling: `replaced` groups in `replacements` rounds; `varied`: first sequence_id of groups known to have variance.

    `interrupted`: restored from a checkpoint after `rounds` rounds with `decoded` tokens; the caches are still empty.
    """

    finishers: list[Sequence] = field(default_factory=list)
    chunk: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)
    decode: tuple[float, float] = (0.0, 0.0)
    interrupted: bool = False
    rounds: int = 0
    decoded: int = 0
    replacements: int = 0
    replaced: int = 0
    varied: set[int] = field(default_factory=set)
