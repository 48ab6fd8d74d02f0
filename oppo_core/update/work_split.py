"""How the update is divided between the actor's process and its partner: a ledger of work in counted tokens.

Only the division hangs on these estimates, so a run is reproducible, and a wrong constant costs time, never exactness.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oppo_core.models.protocol import Network
from oppo_core.rollout.sequence import Sequence

# Measured with two threads' worth of cores, hidden 128 to 256 (docs/performance.md): a decode round's calls cost as much as a
# forward pass over this many parameters × tokens, and a token in a decode round as much as this many tokens of a forward pass.
ROUND_OVERHEAD_PARAMETERS_A_LAYER = 8.4e6
DECODE_TOKEN = 2.5
CRITIC = 3.0  # forward and backward pass
ACTOR_EXTRA = 3.0  # backward pass and the gradient's way through the logits
EARLY_ACTOR_EXTRA = 5.5  # the same with a second backward pass
SMALLEST_PASS_TOKENS = 192


@dataclass(frozen=True, slots=True)
class Costs:
    """Work in units of one token's forward pass through one network without its head."""

    round_overhead: float
    logits: float
    whitens: bool

    @property
    def read(self) -> float:
        """Reward and reference read a token."""
        return 2.0 + self.logits

    @property
    def actor(self) -> float:
        """Forward and backward pass over a token."""
        return 1.0 + self.logits + ACTOR_EXTRA

    @property
    def early_actor(self) -> float:
        """The same with two backward passes."""
        return 1.0 + self.logits + EARLY_ACTOR_EXTRA


def costs_of(network: Network, whitens: bool) -> Costs:
    """Estimates for a network, from the sizes of its weights. `whitens`: whether advantages are whitened."""
    matrices = [p for p in network.parameters() if p.dim() == 2]
    tables = [p.numel() for p in matrices if max(p.shape) > 8 * min(p.shape)]
    body = max(1, sum(p.numel() for p in matrices) - sum(tables))
    overhead = ROUND_OVERHEAD_PARAMETERS_A_LAYER * len(network.cache_shape.layers) / body
    return Costs(overhead, max(tables, default=0) / body, whitens)


@dataclass(slots=True)
class Ledger:
    """What was decoded and ordered in the present step, and until when each process is busy (same units as `Costs`)."""

    actor_time: float = 0.0
    chunk_time: float = 0.0
    partner_time: float = 0.0
    decoded_tokens: int = 0
    critic: set[int] = field(default_factory=set)
    actor: set[int] = field(default_factory=set)

    def decoded(self, rounds: int, tokens: int, costs: Costs) -> None:
        """The decoder has done `rounds` with `tokens` in all since the step began; the partner reads what is new."""
        before, self.actor_time = self.actor_time, rounds * costs.round_overhead + tokens * DECODE_TOKEN
        self.chunk_time = self.actor_time - before
        new, self.decoded_tokens = tokens - self.decoded_tokens, tokens
        self.partner_time = max(self.partner_time, self.actor_time) + new * costs.read

    def worth_a_pass(self, sequences: list[Sequence]) -> bool:
        """Whether these are enough tokens for an efficient pass."""
        return sum(s.length for s in sequences) >= SMALLEST_PASS_TOKENS

    def affordable(self, sequences: list[Sequence], costs: Costs) -> list[Sequence]:
        """Those, shortest first, on which the partner can train the actor as well before the next chunk, if that takes as long as
        the last one; none where they are too few for an efficient pass.

        More would make the actor wait for its partner at the step's end, for work that costs two backward passes instead of one.
        """
        room = self.actor_time + self.chunk_time - self.partner_time - CRITIC * sum(s.length for s in sequences)
        found: list[Sequence] = []
        for sequence in sorted(sequences, key=lambda s: (s.length, s.sequence_id)):
            room -= sequence.length * costs.early_actor
            if room < 0:
                break
            found.append(sequence)
        return found if self.worth_a_pass(found) else []

    def ordered(self, sequences: list[Sequence], with_actor: bool, costs: Costs) -> None:
        """The partner trains the critic on these, and with `with_actor` the actor as well."""
        ids = {s.sequence_id for s in sequences}
        tokens = sum(s.length for s in sequences)
        self.critic |= ids
        self.partner_time += tokens * CRITIC
        if with_actor:
            self.actor |= ids
            self.partner_time += tokens * costs.early_actor

    def shares(self, trained: list[Sequence], costs: Costs) -> tuple[list[int], list[int]]:
        """Rows of the batch on which the actor's process trains the actor, and those on which the partner does.

        Longest first, each to whoever would be done sooner.
        """
        rest = sum(s.length for s in trained if s.sequence_id not in self.critic) * CRITIC
        free = {"mine": self.actor_time, "theirs": max(self.partner_time, self.actor_time) + rest}
        rows: dict[str, list[int]] = {"mine": [], "theirs": []}
        left = [row for row, s in enumerate(trained) if s.sequence_id not in self.actor]
        for row in sorted(left, key=lambda row: (-trained[row].length, row)):
            chosen = min(("mine", "theirs"), key=lambda name: free[name])
            rows[chosen].append(row)
            free[chosen] += trained[row].length * costs.actor
        return sorted(rows["mine"]), sorted(rows["theirs"])
