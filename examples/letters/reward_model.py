"""Training of the reward model from preferences, labelled with noise by the rule (Bradley–Terry).

Pairs span prompts: pairs within one prompt leave an arbitrary offset per form, and the sagas' offset hid the effect of length.
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

from .batches import Row, batch_by_length, encode_row, pad
from .grammar import MAX_NEW_TOKENS, draw_prompt, draw_response, draw_varied_response
from .one_cycle import OneCycle

RESPONSES_PER_PROMPT = 4
LABEL_SHARPNESS = 6.0  # a difference of 0.5 in the rule is labelled correctly with probability 0.95
BATCH_RESPONSES = 16
FORWARD_TOKENS = 1536
MUON_RATE, ADAMW_RATE = 0.01, 3e-3


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """Tokens of a prompt and its response, and the rule's score, which only the labels use."""

    row: Row
    rule: float


def draw_scored(rng: random.Random, tokenizer: Tokenizer, prompts: int) -> list[ScoredResponse]:
    """Responses to random prompts, `RESPONSES_PER_PROMPT` each: one ordinary, the others varied.

    Forms are drawn uniformly, so that lengths of rare forms are learned too.
    """
    scored = []
    for _ in range(prompts):
        prompt = draw_prompt(rng, rng.choice(list(FORMS)))
        for write in (draw_response, *[draw_varied_response] * (RESPONSES_PER_PROMPT - 1)):
            response = write(rng, prompt)
            scored.append(
                ScoredResponse(encode_row(tokenizer, prompt, response, ended=is_finished(response)), score(prompt, response))
            )
    return scored


def draw_preferences(rng: random.Random, responses: Sequence[ScoredResponse]) -> list[tuple[int, int]]:
    """(preferred, other) of every pair of `responses`, as indices, drawn from the Bradley–Terry model."""
    return [(i, j) if prefers(rng, responses[i], responses[j]) else (j, i) for i, j in combinations(range(len(responses)), 2)]


def prefers(rng: random.Random, one: ScoredResponse, other: ScoredResponse) -> bool:
    """Whether `one` is preferred, with probability sigmoid(sharpness × difference of rule scores)."""
    return rng.random() < 1 / (1 + math.exp(-LABEL_SHARPNESS * (one.rule - other.rule)))


def is_finished(response: str) -> bool:
    """Whether `<eos>` follows: the response has a closing and fits the limit."""
    words = response.split()
    return words[-1] == CLOSING and len(words) < MAX_NEW_TOKENS


def train_reward_model(
    actor: TinyTransformer, tokenizer: Tokenizer, prompts: int, seed: int, progress: Callable[[float], None]
) -> TinyTransformer:
    """A reward model initialized from the actor's backbone, trained on responses to `prompts` prompts in one pass."""
    rng = random.Random(seed)
    scored = draw_scored(rng, tokenizer, prompts)
    batches = [scored[i : i + BATCH_RESPONSES] for i in range(0, len(scored), BATCH_RESPONSES)]
    model = TinyTransformer(actor.architecture, "scalar")
    head = {"head.weight": torch.zeros(1, actor.architecture.hidden), "head.bias": torch.zeros(1)}
    model.load_state_dict({**actor.state_dict(), **head})
    cycle = OneCycle(model, MUON_RATE, ADAMW_RATE, len(batches))
    for number, batch in enumerate(batches):
        cycle.step(preference_loss(model, batch, draw_preferences(rng, batch)))
        progress((number + 1) / len(batches))
    return model


def preference_loss(
    model: TinyTransformer, responses: Sequence[ScoredResponse], preferences: Sequence[tuple[int, int]]
) -> Tensor:
    """−log sigmoid(score of the preferred − score of the other), mean over the preferences."""
    scores_N = predict_scores(model, [response.row for response in responses])
    winners, losers = torch.tensor(preferences).T
    return -F.logsigmoid(scores_N[winners] - scores_N[losers]).mean()


def predict_scores(model: TinyTransformer, rows: Sequence[Row]) -> Tensor:
    """Rewards at the last token of every row [N]; rows of similar length share a forward pass."""
    scores: list[Tensor] = []
    order: list[int] = []
    for group in batch_by_length(range(len(rows)), lambda i: len(rows[i].tokens), FORWARD_TOKENS):
        tokens_NT, positions_NT, lengths_N = pad([rows[i] for i in group])
        last_NH = model.hidden(tokens_NT, positions_NT)[torch.arange(len(group)), lengths_N - 1]
        scores.append(model.scalar(last_NH))
        order += group
    return torch.cat(scores)[torch.tensor(order).argsort()]


@torch.no_grad()
def normalize(model: TinyTransformer, rows: Sequence[Row]) -> None:
    """Rescale the head to mean 0 and standard deviation 1 over `rows`."""
    assert model.head is not None
    scores_N = predict_scores(model, rows)
    mean, deviation = scores_N.mean(), scores_N.std()
    model.head.weight.div_(deviation)
    model.head.bias.sub_(mean).div_(deviation)
