"""Evaluation of a policy by the rule, on held-out prompts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oppo_core.models.model_io import load_tiny
from oppo_core.rules.letters import score

from .grammar import MAX_NEW_TOKENS
from .report import length_statistics
from .sampling import decode_text, sample_responses
from .vocabulary import build_tokenizer

SAMPLING_SEED = 5  # the same for every policy


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean rule score of one response per prompt, its standard error, and response lengths (tokens)."""

    rule: float
    standard_error: float
    length_median: float
    length_p95: float


def read_prompts(path: Path) -> list[str]:
    """The prompts of a JSON Lines file."""
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def evaluate(actor: Path, prompts: Sequence[str]) -> Evaluation:
    """Sample a response to each prompt from the model folder `actor` and score them."""
    tokenizer = build_tokenizer()
    responses = sample_responses(load_tiny(actor, "lm").eval(), tokenizer, prompts, MAX_NEW_TOKENS, SAMPLING_SEED)
    scores = [score(prompt, decode_text(tokenizer, response)) for prompt, response in zip(prompts, responses, strict=True)]
    lengths = length_statistics([len(response) for response in responses])
    error = statistics.stdev(scores) / len(scores) ** 0.5
    return Evaluation(statistics.mean(scores), error, lengths["length_median"], lengths["length_p95"])
