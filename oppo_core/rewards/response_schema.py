"""Validates a reward service's response: {"scores": [one number per answer, in order]}."""

from __future__ import annotations

import json

LARGEST_SCORE = 1e6
EXCERPT_CHARS = 200


class BadResponseError(Exception):
    """The response is no list of scores."""


def parse_scores(body: bytes, count: int) -> list[float]:
    """The scores of `count` answers.

    Raises:
        BadResponseError: not JSON, another shape, another count, or a score that is no number, or not within ±1,000,000.
    """
    try:
        response = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadResponseError(f"not JSON ({type(error).__name__})") from None
    scores = response.get("scores") if isinstance(response, dict) else None
    if not isinstance(scores, list):
        raise BadResponseError('not {"scores": […]}')
    if len(scores) != count:
        raise BadResponseError(f"{len(scores)} scores for {count} answers")
    return [_score(position, score) for position, score in enumerate(scores)]


def _score(position: int, score: object) -> float:
    where = f"scores[{position}]"
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        raise BadResponseError(f"{where} is a {type(score).__name__}, not a number")
    if not abs(score) <= LARGEST_SCORE:  # NaN fails every comparison, too
        raise BadResponseError(f"{where} is {score!r:.40}; a score must lie within ±{LARGEST_SCORE:,.0f}")
    return float(score)


def excerpt(body: bytes, secret: str | None) -> str:
    """The first bytes of a response for an error message, without the token."""
    text = body.decode(errors="replace")
    if secret:
        text = text.replace(secret, "[token]")
    return repr(text[:EXCERPT_CHARS]) if text else "nothing"
