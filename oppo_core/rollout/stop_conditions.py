"""Stop conditions: token ids, and texts that end an answer as soon as they stand in it.

An answer's text is followed token by token, by decoding a few tokens anew each time: those whose characters were not complete
yet, and some before them, because a tokenizer may write a token otherwise at the beginning. So it is found across the borders of
tokens, and whether an answer ends is a function of its own tokens, never of company, chunks or drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.tokenizer import TextCodec

INCOMPLETE = "\ufffd"  # what a character is decoded to while some of its bytes are missing
# A character has at most four bytes: what is incomplete for so many tokens is not text and never will be.
PATIENCE_TOKENS = 16


@dataclass(slots=True)
class Reading:
    """How far an answer's text is known: the first `seen` tokens, of which `read` have given complete characters.

    The tokens from `start` on are decoded anew with each new one. `text` are the last characters known.
    """

    seen: int = 0
    start: int = 0
    read: int = 0
    text: str = ""


class StopConditions:
    """Token ids and texts that end an answer, beside the end-of-sequence token."""

    def __init__(self, tokens: list[int], texts: list[str], codec: TextCodec) -> None:
        self.tokens = frozenset(tokens)
        self.texts = tuple(texts)
        self._codec = codec
        self._kept = max((len(text) for text in texts), default=1) - 1
        self._readings: dict[int, Reading] = {}

    def reached(self, sequence: Sequence) -> bool:
        """Whether the last token of `sequence` ends it. To be asked after each token; what was missed is made up for."""
        if sequence.response[-1] in self.tokens:
            return True
        if not self.texts:
            return False
        reading = self._readings.get(sequence.sequence_id)
        if reading is None or reading.seen != sequence.length - 1:
            reading = self._readings[sequence.sequence_id] = Reading()
        while reading.seen < sequence.length:
            found = self._read(reading, sequence.response)
        return found

    def forget(self, sequence_id: int) -> None:
        """The answer is finished: nobody will ask again."""
        self._readings.pop(sequence_id, None)

    def keep(self, sequence_ids: Iterable[int]) -> None:
        """Forget all but these: the others have left unfinished."""
        known = set(sequence_ids)
        self._readings = {i: reading for i, reading in self._readings.items() if i in known}

    def _read(self, reading: Reading, tokens: list[int]) -> bool:
        """Follow one more token; whether a stop text stands in the text now."""
        reading.seen += 1
        before = self._codec.decode(tokens[reading.start : reading.read])
        now = self._codec.decode(tokens[reading.start : reading.seen])
        text = reading.text + now[len(before) :]
        given_up = reading.seen - reading.read >= PATIENCE_TOKENS
        if len(now) > len(before) and (given_up or not now.endswith(INCOMPLETE)):
            reading.start, reading.read = reading.read, reading.seen
            reading.text = text[max(0, len(text) - self._kept) :]
        return any(stop in text for stop in self.texts)
