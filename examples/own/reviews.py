"""Task of `examples.own.make`: product reviews of one to about thirty sentences, in one of three moods."""

from __future__ import annotations

import random

PRODUCTS = ("kettle", "lamp", "chair", "radio", "tent", "bicycle")
PARTS = ("handle", "colour", "price", "weight", "sound", "box", "manual", "shape")
KIND = ("lovely", "clever", "sturdy", "quiet", "bright", "gentle")
PLAIN = ("usual", "grey", "square", "middling")
UNKIND = ("awful", "flimsy", "noisy", "dull", "crooked", "greedy")
MOODS = {"delighted": (0.8, 0.1), "undecided": (0.3, 0.3), "annoyed": (0.05, 0.85)}  # shares of kind and unkind words
REQUESTS = ("review the {}", "what about the {}", "tell us of the {}")
ENDING = "done"
CONTEXT = 256
MAX_SENTENCES = 36
_REQUEST_WORDS = " ".join(REQUESTS).replace("{}", "").split()
WORDS = tuple(dict.fromkeys([*_REQUEST_WORDS, "its", "is", ".", ENDING, *PRODUCTS, *PARTS, *KIND, *PLAIN, *UNKIND, *MOODS]))


def draw_prompt(rng: random.Random) -> str:
    """A request for a review."""
    return rng.choice(REQUESTS).format(rng.choice(PRODUCTS))


def draw_review(rng: random.Random, prompt: str) -> str:
    """A review of the requested product. Lengths are long-tailed, up to 36 sentences."""
    mood = rng.choice(list(MOODS))
    kind, unkind = MOODS[mood]
    words = [mood, "the", prompt.split()[-1], "."]
    for _ in range(min(MAX_SENTENCES, max(1, round(4 * 2 ** rng.gauss(0, 1.3))))):
        adjectives = rng.choices((KIND, UNKIND, PLAIN), (kind, unkind, 1 - kind - unkind))[0]
        words += ["its", rng.choice(PARTS), "is", rng.choice(adjectives), "."]
    return " ".join([*words, ENDING])


def kindness(review: str) -> float:
    """Kind minus unkind adjectives, per sentence."""
    words = review.split()
    sentences = max(1, words.count("its"))
    return (sum(word in KIND for word in words) - sum(word in UNKIND for word in words)) / sentences
