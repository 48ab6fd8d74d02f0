"""Data-parallel sharding of prompts: which group, and so which prompt, each rank starts next.

Groups are numbered through the whole run; group n answers the n-th prompt of the stream. Each of W ranks takes every W-th number
at its own pace. When a run resumes with another number of ranks, sharding restarts above the highest number taken; lower numbers
that were not taken yet are *owed* and are taken first.

Law: every number is taken by exactly one rank, once; numbers not taken are the owed ones and those beyond each rank's last.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field


@dataclass(slots=True)
class PromptSharding:
    """Numbers of `rank` among `world` ranks: `owed` ones, then every `world`-th from `begun`; `taken` counts those used.

    The field names are keys of the checkpoint.
    """

    rank: int = 0
    world: int = 1
    begun: int = 0
    owed: list[int] = field(default_factory=list)
    taken: int = 0

    def take(self) -> int:
        """Take and return the next number."""
        owed, index = len(self.owed), self.taken
        self.taken += 1
        return self.owed[index] if index < owed else self.begun + (index - owed) * self.world + self.rank

    @property
    def coming(self) -> int:
        """The first number beyond the owed ones that this rank has not taken."""
        return self.begun + max(0, self.taken - len(self.owed)) * self.world + self.rank


def reshard_prompts(shards: Rows[PromptSharding], world: int) -> list[PromptSharding]:
    """Reshard the prompts of all ranks of a run to `world` ranks; indexed by rank."""
    begun = max([shards[0].begun, *(rank.coming - rank.world + 1 for rank in shards)])
    owed = [number for rank in shards for number in (*rank.owed[rank.taken :], *range(rank.coming, begun, rank.world))]
    return [PromptSharding(rank, world, begun, sorted(owed)[rank::world]) for rank in range(world)]
