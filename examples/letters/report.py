"""The figures that say whether what was prepared is good enough to train on."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from oppo_core.models.tiny_transformer import TinyTransformer
from oppo_core.rules.letters import score

from .batches import Row
from .reward_model import ANSWERS_A_PROMPT, draw_judged, draw_verdicts, scores_of
from .sampling import as_text
from .vocabulary import EOS, token_id

COMPARED_PROMPTS = 150
TAIL_BATCH = 16  # the batch size whose longest answer is compared with the mean


def answer_figures(tokenizer: Tokenizer, prompts: Sequence[str], answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """Lengths (tokens, `<eos>` included) and rule scores of sampled answers."""
    scores = [score(prompt, as_text(tokenizer, answer)) for prompt, answer in zip(prompts, answers, strict=True)]
    unfinished = sum(answer[-1] != token_id(EOS) for answer in answers)
    return {
        **length_figures([len(answer) for answer in answers]),
        "unfinished": unfinished / len(answers),
        "rule_mean": statistics.mean(scores),
        "rule_sd": statistics.stdev(scores),
    }


def length_figures(lengths: Sequence[int]) -> dict[str, float]:
    """Median, mean, 95th percentile, and the expected longest of a batch of 16 as a multiple of the mean."""
    ordered, rng = sorted(lengths), random.Random(0)
    mean = statistics.mean(ordered)
    longest = statistics.mean(max(rng.choices(ordered, k=TAIL_BATCH)) for _ in range(2000))
    p95 = ordered[int(0.95 * len(ordered))]
    return {"length_median": statistics.median(ordered), "length_mean": mean, "length_p95": p95, "tail_ratio": longest / mean}


@torch.no_grad()
def reward_figures(
    model: TinyTransformer, tokenizer: Tokenizer, prompts: Sequence[str], rows: Sequence[Row], seed: int
) -> dict[str, float]:
    """How well the reward model judges: fresh pairs against the judge and the rule, and the actor's own answers.

    `judge_accuracy` is the judge's own against the rule: what a perfect model would reach in `pair_accuracy`.
    """
    rng = random.Random(seed + 1_000_003)
    judged = draw_judged(rng, tokenizer, COMPARED_PROMPTS)
    learned = scores_of(model, [answer.row for answer in judged]).tolist()
    verdicts = draw_verdicts(rng, judged)
    within = [(i, j) for i, j in verdicts if i // ANSWERS_A_PROMPT == j // ANSWERS_A_PROMPT]
    own = scores_of(model, rows)
    own_rules = [
        score(prompt, as_text(tokenizer, row.tokens[row.prompt_length :])) for prompt, row in zip(prompts, rows, strict=True)
    ]
    return {
        "pair_accuracy": statistics.mean(float(learned[i] > learned[j]) for i, j in verdicts),
        "pair_accuracy_same_prompt": statistics.mean(float(learned[i] > learned[j]) for i, j in within),
        "judge_accuracy": statistics.mean(float(judged[i].rule > judged[j].rule) for i, j in verdicts),
        "spearman_pairs": spearman(learned, [answer.rule for answer in judged]),
        "spearman_actor": spearman(own.tolist(), own_rules),
        "actor_mean": own.mean().item(),
        "actor_sd": own.std().item(),
    }


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Rank correlation; ties, which are rare here, keep their order."""
    ranks = [torch.tensor(values, dtype=torch.float64).argsort().argsort().double() for values in (xs, ys)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])
