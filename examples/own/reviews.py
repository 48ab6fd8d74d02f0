"""The task of `examples.own.make`: product reviews of one to some thirty sentences, in one of three moods."""

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
MOST_SENTENCES = 36
_ASKED = " ".join(REQUESTS).replace("{}", "").split()
WORDS = tuple(dict.fromkeys([*_ASKED, "its", "is", ".", ENDING, *PRODUCTS, *PARTS, *KIND, *PLAIN, *UNKIND, *MOODS]))


def draw_prompt(rng: random.Random) -> str:
    """Somebody asks for a review."""
    return rng.choice(REQUESTS).format(rng.choice(PRODUCTS))


def draw_review(rng: random.Random, prompt: str) -> str:
    """A review of what the prompt asks for. Lengths have a long tail: some run to thirty sentences."""
    mood = rng.choice(list(MOODS))
    kind, unkind = MOODS[mood]
    words = [mood, "the", prompt.split()[-1], "."]
    for _ in range(min(MOST_SENTENCES, max(1, round(4 * 2 ** rng.gauss(0, 1.3))))):
        adjectives = rng.choices((KIND, UNKIND, PLAIN), (kind, unkind, 1 - kind - unkind))[0]
        words += ["its", rng.choice(PARTS), "is", rng.choice(adjectives), "."]
    return " ".join([*words, ENDING])


def kindness(review: str) -> float:
    """Kind adjectives less unkind ones, a sentence."""
    words = review.split()
    sentences = max(1, words.count("its"))
    return (sum(word in KIND for word in words) - sum(word in UNKIND for word in words)) / sentences
