"""The reward rule of the example task: scores letters such as "write a letter about the sea".

It rewards warm words, the topic, complete and distinct sentences, a closing, and a length typical of the form. Without the length
term a policy learns to stop early, and the long tail of lengths that overlap needs disappears within tens of steps.
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
OPENINGS = ("hooray", "well", "alas")  # not scored
CLOSING = "goodbye"
STOP = "."

NOUNS = tuple(noun for nouns in TOPICS.values() for noun in nouns)
ADJECTIVES = WARM + COLD + NEUTRAL
# the <adjective> <noun> <verb> a <adjective> <noun>
SENTENCE = tuple(map(frozenset, (["the"], ADJECTIVES, NOUNS, VERBS, ["a"], ADJECTIVES, NOUNS)))

TOPIC_WEIGHT = 0.5
BROKEN_WEIGHT = 0.5
REPEATED_WEIGHT = 0.5
NO_CLOSING_PENALTY = 0.3
LENGTH_WEIGHT = 0.5
LENGTH_CAP_OCTAVES = 3.0


@dataclass(frozen=True, slots=True)
class Marks:
    """The parts of a response's score."""

    warmth: float  # (warm − cold) / adjectives, −1 … 1; 0 without adjectives
    on_topic: float  # share of the nouns that belong to the prompt's topic; 0 without nouns
    broken: float  # share of ungrammatical sentences
    repeated: float  # share of repeated sentences
    closed: bool  # the response ends with the closing word
    octaves_off: float  # |log2(length / typical length of the form)|, at most LENGTH_CAP_OCTAVES


def score(prompt: str, response: str) -> float:
    """The reward of a response, about −2.5 … 1.5.

    Args:
        prompt: names a form and a topic of this module.
        response: text; words that start with < (special tokens) do not count.

    Raises:
        ValueError: the prompt names no known form or topic.
    """
    marks = compute_marks(prompt, response)
    good = marks.warmth + TOPIC_WEIGHT * marks.on_topic
    bad = BROKEN_WEIGHT * marks.broken + REPEATED_WEIGHT * marks.repeated + LENGTH_WEIGHT * marks.octaves_off
    return good - bad - (0.0 if marks.closed else NO_CLOSING_PENALTY)


def compute_marks(prompt: str, response: str) -> Marks:
    """The parts of `score`. Raises ValueError as `score` does."""
    typical, topic = FORMS[find_choice(prompt, FORMS)], TOPICS[find_choice(prompt, TOPICS)]
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


def find_choice(prompt: str, choices: Collection[str]) -> str:
    """The first of `choices` that the prompt names. Raises ValueError when it names none."""
    for word in prompt.split():
        if word in choices:
            return word
    raise ValueError(f"the prompt {prompt!r} names none of {', '.join(choices)}")


def _sentences(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Words between stops; an unfinished last sentence gets a mark that makes it ungrammatical."""
    sentences: list[tuple[str, ...]] = []
    current: list[str] = []
    for word in words:
        if word == STOP:
            sentences.append(tuple(current))
            current = []
        else:
            current.append(word)
    return [*sentences, (*current, "…")] if current else sentences


def _grammatical(sentence: Sequence[str]) -> bool:
    return len(sentence) == len(SENTENCE) and all(word in allowed for word, allowed in zip(sentence, SENTENCE, strict=True))


def _share(words: Sequence[str], chosen: Sequence[str]) -> float:
    return sum(word in chosen for word in words) / len(words) if words else 0.0
