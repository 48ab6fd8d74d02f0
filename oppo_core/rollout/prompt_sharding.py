"""Whose turn it is: which of the run's groups, and so which of its prompts, a rank starts next.

Groups are numbered through the whole run, and group n answers the n-th prompt of the stream. Of W ranks each takes every W-th
number, at its own pace. When a run goes on with another number of ranks, that begins anew behind the highest number that anybody
has taken; those below it that nobody had come to yet are *owed*, and are taken first.

Law: every number is taken by one rank, once; those not taken yet are the owed ones and what lies beyond each rank's last.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field


@dataclass(slots=True)
class Turns:
    """`rank`'s turns of `world`: the `owed` numbers, then every `world`-th from `begun`; `taken` of them have been."""

    rank: int = 0
    world: int = 1
    begun: int = 0
    owed: list[int] = field(default_factory=list)
    taken: int = 0

    def take(self) -> int:
        """The next number."""
        owed, turn = len(self.owed), self.taken
        self.taken += 1
        return self.owed[turn] if turn < owed else self.begun + (turn - owed) * self.world + self.rank

    @property
    def coming(self) -> int:
        """The first number of its own beyond the owed ones that it has not taken yet."""
        return self.begun + max(0, self.taken - len(self.owed)) * self.world + self.rank


def dealt(turns: Rows[Turns], world: int) -> list[Turns]:
    """The turns of all ranks of a run, dealt anew to `world` ranks; by rank."""
    begun = max([turns[0].begun, *(rank.coming - rank.world + 1 for rank in turns)])
    owed = [number for rank in turns for number in (*rank.owed[rank.taken :], *range(rank.coming, begun, rank.world))]
    return [Turns(rank, world, begun, sorted(owed)[rank::world]) for rank in range(world)]
