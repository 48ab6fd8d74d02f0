"""Grammar that generates prompts and responses, including degraded responses for the reward model.

Lengths are long-tailed: the requested form sets the scale (about ten words for a note, three hundred for a saga). A response has
one mood, given by its first word: a policy becomes warmer by one early token, so the KL penalty does not shorten sagas.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from oppo_core.rules.letters import (
    ADJECTIVES,
    CLOSING,
    COLD,
    FORMS,
    NEUTRAL,
    NOUNS,
    OPENINGS,
    STOP,
    TOPICS,
    VERBS,
    WARM,
    find_choice,
)

MAX_PROMPT_TOKENS = 16
MAX_NEW_TOKENS = 384  # including <eos>

FORM_SHARES = {"note": 0.34, "letter": 0.54, "story": 0.03, "saga": 0.09}
REQUESTS = (
    "write a {form} about the {topic}",
    "please write a {form} about the {topic}",
    "write me a {form} about the {topic}",
    "send us a {form} about the {topic} today",
    "please write us a {form} about the {topic} now",
)
WORDS_PER_SENTENCE = 8
MAX_SENTENCES = (MAX_NEW_TOKENS - 3) // WORDS_PER_SENTENCE  # leaves room for opening, closing and <eos>
TYPICAL_TOPIC_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Style:
    """Style of a response."""

    opening: str
    warm: float  # share of warm adjectives
    cold: float  # share of cold adjectives; the rest is neutral
    on_topic: float = TYPICAL_TOPIC_SHARE  # share of nouns from the topic; the others are random


MOODS = tuple(Style(opening, *shares) for opening, shares in zip(OPENINGS, ((0.8, 0.05), (0.3, 0.3), (0.05, 0.8)), strict=True))


def draw_prompt(rng: random.Random, form: str | None = None, *, held_out: bool = False) -> str:
    """A request for a form and topic. Held-out prompts use pairs of wording and topic that no training prompt has."""
    form = form or rng.choices(list(FORM_SHARES), list(FORM_SHARES.values()))[0]
    topic = rng.randrange(len(TOPICS))
    wordings = [words for words in range(len(REQUESTS)) if ((words + topic) % len(REQUESTS) == 0) == held_out]
    return REQUESTS[rng.choice(wordings)].format(form=form, topic=list(TOPICS)[topic])


def draw_response(rng: random.Random, prompt: str) -> str:
    """A response of the pre-training data: one mood, a length that fits the form."""
    return write(rng, prompt, rng.choice(MOODS), draw_sentences(rng, find_choice(prompt, FORMS)))


def draw_sentences(rng: random.Random, form: str) -> int:
    """Number of sentences of a response of this form."""
    if form == "note":
        return rng.choice((1, 1, 1, 2))
    if form == "letter":
        return _clamp(4 * 2 ** rng.gauss(0, 0.25), 2, 8)
    if form == "story":
        return _clamp(12 * 2 ** rng.gauss(0, 0.3), 7, 22)
    return _clamp(rng.gauss(40, 4.5), 26, MAX_SENTENCES)


def write(rng: random.Random, prompt: str, style: Style, sentences: int) -> str:
    """A response of `sentences` sentences in this style, including the closing word."""
    nouns = TOPICS[find_choice(prompt, TOPICS)]
    words = [style.opening]
    for _ in range(sentences):
        words += ["the", _adjective(rng, style), _noun(rng, style, nouns), rng.choice(VERBS)]
        words += ["a", _adjective(rng, style), _noun(rng, style, nouns), STOP]
    return " ".join([*words, CLOSING])


def draw_varied_response(rng: random.Random, prompt: str) -> str:
    """A response for the reward model's pairs: any warmth and topic share, often another length, sometimes degraded.

    Covers what a policy may exploit: truncation, rambling, repetition, broken grammar.
    """
    warm, cold, neutral = (rng.gammavariate(0.6, 1) + 1e-9 for _ in range(3))
    total = warm + cold + neutral
    style = Style(rng.choice(OPENINGS), warm / total, cold / total, rng.choice((0.0, TYPICAL_TOPIC_SHARE, rng.random(), 1.0)))
    form = find_choice(prompt, FORMS) if rng.random() < 0.5 else rng.choice(list(FORMS))
    sentences = _clamp(draw_sentences(rng, form) * 2 ** rng.gauss(0, rng.choice((0.0, 0.7))), 1, MAX_SENTENCES)
    response = write(rng, prompt, style, sentences)
    return rng.choice(DEGRADATIONS)(rng, response) if rng.random() < 0.4 else response


def _truncate(rng: random.Random, response: str) -> str:
    """Truncate at a random word."""
    words = response.split()
    return " ".join(words[: rng.randint(1, len(words) - 1)])


def _repeat(rng: random.Random, response: str) -> str:
    """Repeat one sentence up to the end."""
    opening, rest = response.split(" ", 1)
    *sentences, closing = rest.split(f" {STOP} ")
    start = rng.randrange(len(sentences))
    again = [sentences[start]] * (len(sentences) - start)
    return f"{opening} " + f" {STOP} ".join([*sentences[:start], *again, closing])


def _ramble(rng: random.Random, response: str) -> str:
    """Continue after the end, by repetition."""
    words = response.split()
    return " ".join((words * (1 + MAX_NEW_TOKENS // len(words)))[: rng.choice((MAX_NEW_TOKENS, 2 * len(words)))][:MAX_NEW_TOKENS])


def _scramble(rng: random.Random, response: str) -> str:
    """Replace random words."""
    share = rng.choice((0.02, 0.1, 0.5))
    return " ".join(rng.choice(ADJECTIVES + NOUNS + VERBS) if rng.random() < share else word for word in response.split())


def _stammer(rng: random.Random, response: str) -> str:
    """Use one adjective everywhere; grammar and warmth remain valid."""
    word = rng.choice(ADJECTIVES)
    return " ".join(word if w in ADJECTIVES else w for w in response.split())


DEGRADATIONS: tuple[Callable[[random.Random, str], str], ...] = (_truncate, _repeat, _ramble, _scramble, _stammer)


def _adjective(rng: random.Random, style: Style) -> str:
    kind = rng.choices((WARM, COLD, NEUTRAL), (style.warm, style.cold, 1 - style.warm - style.cold))[0]
    return rng.choice(kind)


def _noun(rng: random.Random, style: Style, nouns: tuple[str, ...]) -> str:
    return rng.choice(nouns if rng.random() < style.on_topic else NOUNS)


def _clamp(value: float, low: int, high: int) -> int:
    return min(max(round(value), low), high)
