"""Prompts of the three tasks. Held-out prompts combine words that no training prompt combines."""

from __future__ import annotations

import random
from typing import Any

HELD_OUT = 64
TRAINED = 150

PLACES = (
    "hotel", "restaurant", "station", "library", "museum", "dentist", "office", "school", "beach", "airport", "garage", "theatre",
    "market", "hospital", "campsite", "bakery",
)  # fmt: skip
OPENINGS = (
    "The food at the {} was", "The people at the {} were", "My first day at the {} was", "Our evening at the {} was",
    "The weather near the {} was", "The music at the {} was", "My visit to the {} was", "The woman at the {} looked",
    "After an hour at the {} I felt", "The children at the {} were", "The view from the {} was", "I thought that the {} was",
    "People say that the {} is", "In the evening we went to the {} and it was",
)  # fmt: skip

TOPICS = (
    "a rainy Monday", "a visit to the dentist", "a lost suitcase", "a noisy neighbour", "a long train journey", "an old bicycle",
    "a broken window", "a night at the hospital", "a power cut", "moving to another city", "a cold winter", "an empty fridge",
    "a traffic jam", "a failed exam", "a stray dog", "a letter from the bank", "a crowded beach", "a forgotten birthday",
    "a job interview", "a football match",
)  # fmt: skip
REQUESTS = (
    "Write one sentence about {}.", "Describe {} in one or two sentences.", "Tell a friend about {} in a few words.",
    "Write a short diary entry about {}.", "What is {} like? Answer briefly.", "Write a short text message about {}.",
    "Begin a story about {} with two sentences.", "Say something about {}.", "Write a headline about {}.",
    "Explain to a child what {} means, in a few words.", "Write a postcard about {}.", "Give your opinion on {} in one sentence.",
)  # fmt: skip

OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}

Record = dict[str, Any]


def sentiment() -> list[Record]:
    """Beginnings of sentences that the model completes."""
    return [{"prompt": opening.format(place)} for opening in OPENINGS for place in PLACES]


def notes() -> list[Record]:
    """Requests for short texts, as chat messages."""
    return [_chat(request.format(topic)) for request in REQUESTS for topic in TOPICS]


def arithmetic() -> list[Record]:
    """Sums, differences and products of two one-digit numbers, as chat messages with the `answer`."""
    digits = range(1, 10)
    return [
        _chat(f"What is {a} {sign} {b}?") | {"answer": operate(a, b)}
        for sign, operate in OPERATORS.items()
        for a in digits
        for b in digits
        if operate(a, b) >= 0
    ]


def split(records: list[Record], seed: int) -> tuple[list[Record], list[Record]]:
    """Shuffled training and held-out prompts, at most `TRAINED` and exactly `HELD_OUT` of them."""
    shuffled = random.Random(seed).sample(records, len(records))
    return shuffled[HELD_OUT:][:TRAINED], shuffled[:HELD_OUT]


def _chat(text: str) -> Record:
    return {"prompt": [{"role": "user", "content": text}]}


TASKS = {"sentiment": sentiment, "notes": notes, "arithmetic": arithmetic}
