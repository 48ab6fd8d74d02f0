"""Quality statistics of the prepared actor and reward model."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from oppo_core.models.tiny_transformer import TinyTransformer
from oppo_core.rules.letters import score

from .batches import Row
from .reward_model import RESPONSES_PER_PROMPT, draw_preferences, draw_scored, predict_scores
from .sampling import decode_text
from .vocabulary import EOS, token_id

COMPARED_PROMPTS = 150
TAIL_BATCH = 16  # batch size for the ratio of longest to mean length


def response_statistics(tokenizer: Tokenizer, prompts: Sequence[str], responses: Sequence[Sequence[int]]) -> dict[str, float]:
    """Lengths (tokens, including `<eos>`) and rule scores of sampled responses."""
    scores = [score(prompt, decode_text(tokenizer, response)) for prompt, response in zip(prompts, responses, strict=True)]
    unfinished = sum(response[-1] != token_id(EOS) for response in responses)
    return {
        **length_statistics([len(response) for response in responses]),
        "unfinished": unfinished / len(responses),
        "rule_mean": statistics.mean(scores),
        "rule_sd": statistics.stdev(scores),
    }


def length_statistics(lengths: Sequence[int]) -> dict[str, float]:
    """Median, mean, 95th percentile, and the expected longest of a batch of 16 as a multiple of the mean."""
    ordered, rng = sorted(lengths), random.Random(0)
    mean = statistics.mean(ordered)
    longest = statistics.mean(max(rng.choices(ordered, k=TAIL_BATCH)) for _ in range(2000))
    p95 = ordered[int(0.95 * len(ordered))]
    return {"length_median": statistics.median(ordered), "length_mean": mean, "length_p95": p95, "tail_ratio": longest / mean}


@torch.no_grad()
def reward_statistics(
    model: TinyTransformer, tokenizer: Tokenizer, prompts: Sequence[str], rows: Sequence[Row], seed: int
) -> dict[str, float]:
    """Accuracy of the reward model on new pairs, and its rank correlation with the rule on the actor's responses.

    `judge_accuracy` is the labeller's accuracy against the rule: the optimum of `pair_accuracy`.
    """
    rng = random.Random(seed + 1_000_003)
    scored = draw_scored(rng, tokenizer, COMPARED_PROMPTS)
    learned = predict_scores(model, [response.row for response in scored]).tolist()
    preferences = draw_preferences(rng, scored)
    within = [(i, j) for i, j in preferences if i // RESPONSES_PER_PROMPT == j // RESPONSES_PER_PROMPT]
    own = predict_scores(model, rows)
    own_rules = [
        score(prompt, decode_text(tokenizer, row.tokens[row.prompt_length :])) for prompt, row in zip(prompts, rows, strict=True)
    ]
    return {
        "pair_accuracy": statistics.mean(float(learned[i] > learned[j]) for i, j in preferences),
        "pair_accuracy_same_prompt": statistics.mean(float(learned[i] > learned[j]) for i, j in within),
        "judge_accuracy": statistics.mean(float(scored[i].rule > scored[j].rule) for i, j in preferences),
        "spearman_pairs": spearman(learned, [response.rule for response in scored]),
        "spearman_actor": spearman(own.tolist(), own_rules),
        "actor_mean": own.mean().item(),
        "actor_sd": own.std().item(),
    }


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's rank correlation; ties are not averaged."""
    ranks = [torch.tensor(values, dtype=torch.float64).argsort().argsort().double() for values in (xs, ys)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
