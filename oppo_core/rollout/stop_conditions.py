"""Stop conditions: the EOS token, the length limit, stop token ids and stop strings.

Text is decoded incrementally: each new token re-decodes the tokens whose characters are still incomplete and a few before them,
because a tokenizer may render the first token of a text differently. So stop strings match across token boundaries, and whether
an answer ends depends on its own tokens only, never on batch composition or chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.tokenizer import TextCodec

INCOMPLETE = "\ufffd"  # decoded in place of a character with missing bytes
# A character has at most four bytes: after this many tokens an incomplete one is not valid text.
INCOMPLETE_LIMIT_TOKENS = 16


@dataclass(slots=True)
class DecodedTail:
    """Incremental decoding state: `seen` tokens processed, of which the first `read` gave complete characters.

    Tokens from `start` on are decoded again with each new token. `text` holds the last decoded characters.
    """

    seen: int = 0
    start: int = 0
    read: int = 0
    text: str = ""


class StopConditions:
    """Stop token ids and stop strings, besides the end-of-sequence token."""

    def __init__(self, tokens: list[int], texts: list[str], codec: TextCodec) -> None:
        self.tokens = frozenset(tokens)
        self.texts = tuple(texts)
        self._codec = codec
        self._overlap = max((len(text) for text in texts), default=1) - 1
        self._tails: dict[int, DecodedTail] = {}

    def reached(self, sequence: Sequence) -> bool:
        """Whether the last token of `sequence` ends it. Call it after each token; skipped tokens are caught up."""
        if sequence.response[-1] in self.tokens:
            return True
        if not self.texts:
            return False
        tail = self._tails.get(sequence.sequence_id)
        if tail is None or tail.seen != sequence.length - 1:
            tail = self._tails[sequence.sequence_id] = DecodedTail()
        while tail.seen < sequence.length:
            is_match = self._decode_next(tail, sequence.response)
        return is_match

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a finished answer."""
        self._tails.pop(sequence_id, None)

    def retain(self, sequence_ids: Iterable[int]) -> None:
        """Drop the state of all other answers."""
        known = set(sequence_ids)
        self._tails = {i: tail for i, tail in self._tails.items() if i in known}

    def _decode_next(self, tail: DecodedTail, tokens: list[int]) -> bool:
        """Decode one more token; returns whether the text now contains a stop string."""
        tail.seen += 1
        before = self._codec.decode(tokens[tail.start : tail.read])
        now = self._codec.decode(tokens[tail.start : tail.seen])
        text = tail.text + now[len(before) :]
        is_expired = tail.seen - tail.read >= INCOMPLETE_LIMIT_TOKENS
        if len(now) > len(before) and (is_expired or not now.endswith(INCOMPLETE)):
            tail.start, tail.read = tail.read, tail.seen
            tail.text = text[max(0, len(text) - self._overlap) :]
        return any(stop in text for stop in self.texts)


def update_finished(sequence: Sequence, eos: int, max_new: int, stops: StopConditions | None) -> bool:
    """Set `finished`, `ended_by_eos` and `stopped` after an appended token; returns `finished`."""
    sequence.ended_by_eos = sequence.response[-1] == eos
    if stops is not None and not sequence.ended_by_eos:
        sequence.stopped = sequence.ended_by_eos = stops.reached(sequence)
    sequence.finished = sequence.ended_by_eos or sequence.length == max_new
    if stops is not None and sequence.finished:
        stops.forget(sequence.sequence_id)
    return sequence.finished
