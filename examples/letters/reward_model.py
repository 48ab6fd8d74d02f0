"""Learns the reward from preferences: answers to one prompt, compared two by two by a judge who is sometimes wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from oppo_core.models.tiny import TinyTransformer
from oppo_core.rules.letters import CLOSING, score

from .batches import Row, encode_row, like_lengths, pad
from .grammar import MAX_NEW_TOKENS, draw_answer, draw_odd_answer, draw_prompt
from .pretrain import one_cycle, take_step

ANSWERS_A_PROMPT = 4
JUDGE_SHARPNESS = 6.0  # a difference of 0.5 in the rule is judged rightly 95 times in 100
BATCH_PROMPTS = 8
FORWARD_TOKENS = 1536
PEAK_LEARNING_RATE = 3e-3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers to one prompt, and the judge's verdict on every pair of them."""

    rows: list[Row]
    rule_scores: list[float]
    verdicts: list[tuple[int, int]]  # (preferred, other), indices into rows


def draw_comparison(rng: random.Random, tokenizer: Tokenizer) -> Comparison:
    """A prompt with `ANSWERS_A_PROMPT` answers, some ordinary, most odd, judged by Bradley–Terry coin flips."""
    prompt = draw_prompt(rng)
    writers = [draw_answer, *[draw_odd_answer] * (ANSWERS_A_PROMPT - 1)]
    answers = [write(rng, prompt) for write in writers]
    scores = [score(prompt, answer) for answer in answers]
    rows = [encode_row(tokenizer, prompt, answer, ended=ends(answer)) for answer in answers]
    verdicts = [(i, j) if preferred(rng, scores[i] - scores[j]) else (j, i) for i, j in combinations(range(len(answers)), 2)]
    return Comparison(rows, scores, verdicts)


def ends(answer: str) -> bool:
    """Whether `<eos>` follows: a finished answer has said goodbye and fits the limit."""
    words = answer.split()
    return words[-1] == CLOSING and len(words) < MAX_NEW_TOKENS


def preferred(rng: random.Random, difference: float) -> bool:
    """The judge's coin: the first answer wins with probability sigmoid(sharpness × difference)."""
    return rng.random() < 1 / (1 + math.exp(-JUDGE_SHARPNESS * difference))


def train_reward_model(
    actor: TinyTransformer, tokenizer: Tokenizer, prompts: int, seed: int, progress: Callable[[float], None]
) -> TinyTransformer:
    """A scalar model that starts from the actor's backbone and learns from `prompts` comparisons, one pass."""
    rng = random.Random(seed)
    comparisons = [draw_comparison(rng, tokenizer) for _ in range(prompts)]
    batches = [comparisons[i : i + BATCH_PROMPTS] for i in range(0, prompts, BATCH_PROMPTS)]
    model = TinyTransformer(actor.architecture, "scalar")
    head = {"head.weight": torch.zeros(1, actor.architecture.hidden), "head.bias": torch.zeros(1)}
    model.load_state_dict({**actor.state_dict(), **head})
    optimizer, schedule = one_cycle(model, PEAK_LEARNING_RATE, len(batches))
    for number, batch in enumerate(batches):
        take_step(model, preference_loss(model, batch), optimizer)
        schedule.step()
        progress((number + 1) / len(batches))
    return model


def preference_loss(model: TinyTransformer, comparisons: Sequence[Comparison]) -> Tensor:
    """−log sigmoid(score of the preferred − score of the other), mean over all verdicts."""
    scores_CA = scores_of(model, [row for c in comparisons for row in c.rows]).view(len(comparisons), -1)
    winners_CV = torch.tensor([[winner for winner, _ in c.verdicts] for c in comparisons])
    losers_CV = torch.tensor([[loser for _, loser in c.verdicts] for c in comparisons])
    return -F.logsigmoid(scores_CA.gather(1, winners_CV) - scores_CA.gather(1, losers_CV)).mean()


def scores_of(model: TinyTransformer, rows: Sequence[Row]) -> Tensor:
    """The head's value at the last token of every row [N]; rows of like length share a forward pass."""
    scores: list[Tensor] = []
    order: list[int] = []
    for group in like_lengths(range(len(rows)), lambda i: len(rows[i].tokens), FORWARD_TOKENS):
        tokens_NT, positions_NT, lengths_N = pad([rows[i] for i in group])
        last_NH = model.hidden(tokens_NT, positions_NT)[torch.arange(len(group)), lengths_N - 1]
        scores.append(model.scalar(last_NH))
        order += group
    return torch.cat(scores)[torch.tensor(order).argsort()]


@torch.no_grad()
def normalise(model: TinyTransformer, rows: Sequence[Row]) -> None:
    """Rescale the head so that scores over `rows` have mean 0 and standard deviation 1."""
    assert model.head is not None
    scores_N = scores_of(model, rows)
    mean, deviation = scores_N.mean(), scores_N.std()
    model.head.weight.div_(deviation)
    model.head.bias.sub_(mean).div_(deviation)
