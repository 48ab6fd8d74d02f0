"""Learns the reward from preferences: pairs of answers, judged by somebody who sees the rule and is sometimes wrong.

The judge compares any two answers, each as an answer to its own prompt. Pairs within one prompt alone would leave an
offset free for every form, and the sagas' offset drowned what there was to learn about their length.
"""

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

from oppo_core.models.tiny_transformer import TinyTransformer
from oppo_core.rules.letters import CLOSING, FORMS, score

from .batches import Row, encode_row, like_lengths, pad
from .grammar import MAX_NEW_TOKENS, draw_answer, draw_odd_answer, draw_prompt
from .one_cycle import OneCycle

ANSWERS_A_PROMPT = 4
JUDGE_SHARPNESS = 6.0  # a difference of 0.5 in the rule is judged rightly 95 times in 100
BATCH_ANSWERS = 16
FORWARD_TOKENS = 1536
MUON_RATE, ADAMW_RATE = 0.01, 3e-3


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer with its prompt as tokens, and what the rule says of it (only the judge sees that)."""

    row: Row
    rule: float


def draw_judged(rng: random.Random, tokenizer: Tokenizer, prompts: int) -> list[Judged]:
    """Answers to random prompts, `ANSWERS_A_PROMPT` to each one after the other: one ordinary, the others odd.

    Forms are drawn evenly: a long form that is rarely asked for must not be rarely judged, or its length goes unlearned.
    """
    judged = []
    for _ in range(prompts):
        prompt = draw_prompt(rng, rng.choice(list(FORMS)))
        for write in (draw_answer, *[draw_odd_answer] * (ANSWERS_A_PROMPT - 1)):
            answer = write(rng, prompt)
            judged.append(Judged(encode_row(tokenizer, prompt, answer, ended=ends(answer)), score(prompt, answer)))
    return judged


def draw_verdicts(rng: random.Random, answers: Sequence[Judged]) -> list[tuple[int, int]]:
    """(preferred, other) of every pair of `answers`, as indices: a Bradley–Terry coin flip each."""
    return [(i, j) if prefers(rng, answers[i], answers[j]) else (j, i) for i, j in combinations(range(len(answers)), 2)]


def prefers(rng: random.Random, one: Judged, other: Judged) -> bool:
    """The judge's coin: `one` wins with probability sigmoid(sharpness × difference in the rule)."""
    return rng.random() < 1 / (1 + math.exp(-JUDGE_SHARPNESS * (one.rule - other.rule)))


def ends(answer: str) -> bool:
    """Whether `<eos>` follows: a finished answer has said goodbye and fits the limit."""
    words = answer.split()
    return words[-1] == CLOSING and len(words) < MAX_NEW_TOKENS


def train_reward_model(
    actor: TinyTransformer, tokenizer: Tokenizer, prompts: int, seed: int, progress: Callable[[float], None]
) -> TinyTransformer:
    """A scalar model that starts from the actor's backbone and learns from answers to `prompts` prompts, one pass."""
    rng = random.Random(seed)
    judged = draw_judged(rng, tokenizer, prompts)
    batches = [judged[i : i + BATCH_ANSWERS] for i in range(0, len(judged), BATCH_ANSWERS)]
    model = TinyTransformer(actor.architecture, "scalar")
    head = {"head.weight": torch.zeros(1, actor.architecture.hidden), "head.bias": torch.zeros(1)}
    model.load_state_dict({**actor.state_dict(), **head})
    cycle = OneCycle(model, MUON_RATE, ADAMW_RATE, len(batches))
    for number, batch in enumerate(batches):
        cycle.step(preference_loss(model, batch, draw_verdicts(rng, batch)))
        progress((number + 1) / len(batches))
    return model


def preference_loss(model: TinyTransformer, answers: Sequence[Judged], verdicts: Sequence[tuple[int, int]]) -> Tensor:
    """−log sigmoid(score of the preferred − score of the other), mean over the verdicts."""
    scores_N = scores_of(model, [answer.row for answer in answers])
    winners, losers = torch.tensor(verdicts).T
    return -F.logsigmoid(scores_N[winners] - scores_N[losers]).mean()


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
