"""Judges a trained policy by the rule, on prompts that no training has seen."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oppo_core.models.model_io import load_tiny
from oppo_core.rules.letters import score

from .grammar import MAX_NEW_TOKENS
from .report import length_figures
from .sampling import as_text, sample_answers
from .vocabulary import build_tokenizer

SAMPLING_SEED = 5  # the same for every policy, so that a difference is the policy's


@dataclass(frozen=True, slots=True)
class Judgement:
    """The rule's mean over one answer a prompt, that mean's standard error, and how long the answers are (tokens)."""

    rule: float
    standard_error: float
    length_median: float
    length_p95: float


def read_prompts(path: Path) -> list[str]:
    """The prompts of a JSON Lines file."""
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def judge(actor: Path, prompts: Sequence[str]) -> Judgement:
    """Sample an answer to each prompt from the model folder `actor` (a checkpoint's, for example) and judge them."""
    tokenizer = build_tokenizer()
    answers = sample_answers(load_tiny(actor, "lm").eval(), tokenizer, prompts, MAX_NEW_TOKENS, SAMPLING_SEED)
    scores = [score(prompt, as_text(tokenizer, answer)) for prompt, answer in zip(prompts, answers, strict=True)]
    lengths = length_figures([len(answer) for answer in answers])
    error = statistics.stdev(scores) / len(scores) ** 0.5
    return Judgement(statistics.mean(scores), error, lengths["length_median"], lengths["length_p95"])
