"""The rule of the example task: how good is an answer to "write a letter about the sea"?

A good answer is warm, keeps to its topic, is made of whole and different sentences, says goodbye, and is about as long
as its form usually is. The length term matters: without it a policy learns to stop early (a short answer risks little)
and the long tail of lengths, which overlap lives on, is gone within some tens of steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

FORMS = {"note": 12, "letter": 34, "story": 98, "saga": 322}
"""Form → typical answer length, words."""
TOPICS = {
    "sea": ("boat", "wave", "harbour", "sailor", "shell", "island"),
    "garden": ("rose", "apple", "gardener", "bee", "fence", "orchard"),
    "city": ("street", "tower", "tram", "baker", "market", "bridge"),
    "forest": ("oak", "fox", "owl", "path", "hunter", "stream"),
    "winter": ("snow", "stove", "coat", "icicle", "sledge", "frost"),
}
WARM = ("kind", "gentle", "bright", "happy", "golden", "sweet", "merry", "tender")
COLD = ("grim", "bitter", "cruel", "dark", "lonely", "harsh", "bleak", "sour")
NEUTRAL = ("old", "small", "quiet", "round", "distant", "plain")
VERBS = ("sees", "finds", "follows", "knows", "calls", "meets", "leaves", "guards")
OPENINGS = ("hooray", "well", "alas")  # each announces a mood; the rule does not care which
CLOSING = "goodbye"
STOP = "."

NOUNS = tuple(noun for nouns in TOPICS.values() for noun in nouns)
ADJECTIVES = WARM + COLD + NEUTRAL
# the <adjective> <noun> <verb> a <adjective> <noun>
SENTENCE = (
    frozenset({"the"}),
    frozenset(ADJECTIVES),
    frozenset(NOUNS),
    frozenset(VERBS),
    frozenset({"a"}),
    frozenset(ADJECTIVES),
    frozenset(NOUNS),
)

TOPIC_WEIGHT = 0.5
BROKEN_WEIGHT = 0.5
REPEATED_WEIGHT = 0.5
NO_CLOSING_PENALTY = 0.3
LENGTH_WEIGHT = 0.5
LENGTH_CAP_OCTAVES = 3.0


@dataclass(frozen=True, slots=True)
class Marks:
    """What the rule sees in an answer."""

    warmth: float  # (warm − cold) / adjectives, −1 … 1; 0 without adjectives
    on_topic: float  # share of the nouns that belong to the prompt's topic; 0 without nouns
    broken: float  # share of the sentences that the grammar does not know
    repeated: float  # share of the sentences that stood in the answer before
    closed: bool  # the answer ends with its closing word
    octaves_off: float  # |log2(length / typical length of the form)|, at most LENGTH_CAP_OCTAVES


def score(prompt: str, response: str) -> float:
    """The reward of an answer, about −2.5 … 1.5.

    Args:
        prompt: the request; it names a form and a topic of this module.
        response: the answer as text; words between < and > (special tokens) do not count.

    Raises:
        ValueError: the prompt names no known form or topic.
    """
    marks = marks_of(prompt, response)
    good = marks.warmth + TOPIC_WEIGHT * marks.on_topic
    bad = BROKEN_WEIGHT * marks.broken + REPEATED_WEIGHT * marks.repeated + LENGTH_WEIGHT * marks.octaves_off
    return good - bad - (0.0 if marks.closed else NO_CLOSING_PENALTY)


def marks_of(prompt: str, response: str) -> Marks:
    """What `score` adds up, part by part. Raises ValueError as `score` does."""
    typical, topic = FORMS[asked(prompt, FORMS)], TOPICS[asked(prompt, TOPICS)]
    words = [word for word in response.split() if not word.startswith("<")]
    closed = words[-1:] == [CLOSING]
    opened = words[:1] != [] and words[0] in OPENINGS
    sentences = _sentences(words[opened : len(words) - closed])
    adjectives = [word for word in words if word in ADJECTIVES]
    nouns = [word for word in words if word in NOUNS]
    return Marks(
        warmth=_share(adjectives, WARM) - _share(adjectives, COLD),
        on_topic=_share(nouns, topic),
        broken=1.0 if not sentences else sum(not _grammatical(s) for s in sentences) / len(sentences),
        repeated=0.0 if not sentences else 1 - len(set(sentences)) / len(sentences),
        closed=closed,
        octaves_off=min(abs(math.log2(max(len(words), 1) / typical)), LENGTH_CAP_OCTAVES),
    )


def asked(prompt: str, choices: Collection[str]) -> str:
    """The first of `choices` that the prompt names. Raises ValueError when it names none."""
    for word in prompt.split():
        if word in choices:
            return word
    raise ValueError(f"the prompt {prompt!r} names none of {', '.join(choices)}")


def _sentences(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Words between stops; an unfinished last sentence loses its place in the grammar by keeping a mark of its own."""
    found: list[tuple[str, ...]] = []
    current: list[str] = []
    for word in words:
        if word == STOP:
            found.append(tuple(current))
            current = []
        else:
            current.append(word)
    return [*found, (*current, "…")] if current else found


def _grammatical(sentence: Sequence[str]) -> bool:
    return len(sentence) == len(SENTENCE) and all(word in allowed for word, allowed in zip(sentence, SENTENCE, strict=True))


def _share(words: Sequence[str], wanted: Sequence[str]) -> float:
    return sum(word in wanted for word in words) / len(words) if words else 0.0
