"""Guesses of what an answer says next: whatever followed the same few tokens before, in its prompt or in itself.

A guess is only ever checked, never trusted: the decoder draws every token from the model's own distribution with the token's
own number and keeps a guess where the two agree, so drafting changes the speed of decoding and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oppo_core.rollout.sequence import Sequence


@dataclass(slots=True)
class Lookup:
    """Where each run of `match` tokens was last followed by something, for the first `indexed` tokens of a sequence."""

    tokens: list[int]
    indexed: int = 0
    followed: dict[tuple[int, ...], int] = field(default_factory=dict)


class Drafter:
    """Prompt lookup: `match` last tokens are searched in what came before, at most `tokens` are guessed."""

    def __init__(self, max_rows: int, tokens: int, match: int) -> None:
        self.max_rows = max_rows
        self.tokens = tokens
        self.match = match
        self._lookups: dict[int, Lookup] = {}

    def forget(self) -> None:
        """A new step begins."""
        self._lookups.clear()

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that may follow; none when the last tokens are new."""
        lookup = self._lookups.get(sequence.sequence_id)
        if lookup is None:
            lookup = self._lookups[sequence.sequence_id] = Lookup(sequence.prompt.tolist())
        lookup.tokens += sequence.response[len(lookup.tokens) - len(sequence.prompt) :]
        said = lookup.tokens
        for end in range(max(lookup.indexed, self.match), len(said)):
            lookup.followed[tuple(said[end - self.match : end])] = end
        lookup.indexed = len(said)
        place = lookup.followed.get(tuple(said[-self.match :]))
        return said[place : place + min(most, self.tokens)] if place is not None else []
