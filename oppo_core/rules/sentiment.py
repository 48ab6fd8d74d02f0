"""Sentiment of a response by VADER, a lexicon of English words (Hutto and Gilbert, ICWSM 2014)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer


def compound(prompt: str, response: str) -> float:
    """VADER's compound score of the response alone, −1 (negative) … 1 (positive)."""
    return float(_analyzer().polarity_scores(response)["compound"])


@cache
def _analyzer() -> SentimentIntensityAnalyzer:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()
