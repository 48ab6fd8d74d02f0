"""Pre-training of the actor: responses of the requested form, in any mood."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from oppo_contract.spec import TinyArchitecture
from oppo_core.models.tiny_transformer import TinyTransformer, init_tiny

from .batches import Row, batch_by_length, encode_row, pad
from .grammar import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, draw_prompt, draw_response
from .one_cycle import OneCycle

BATCH_TOKENS = 1024  # small batches learn more per second
MUON_RATE, ADAMW_RATE = 0.02, 8e-3
# First phase: grammar, moods and topics at a tenth of the cost; lengths are learned in the second phase.
SHORT_FORMS = ("note", "letter")


def architecture(vocab: int) -> TinyArchitecture:
    """Architecture of actor and reward model: the smallest that learns the task."""
    return TinyArchitecture(hidden=64, layers=2, heads=4, context=MAX_PROMPT_TOKENS + MAX_NEW_TOKENS, vocab=vocab)


def pretrain(tokenizer: Tokenizer, answers: int, seed: int, progress: Callable[[float], None]) -> tuple[TinyTransformer, float]:
    """Train a causal language model on `answers` short generated answers and then as many of all forms, one pass.

    Args:
        progress: called with the share done, 0 … 1.

    Returns:
        The model, and its mean loss over the last tenth of the batches, nats a token.
    """
    rng = random.Random(seed)
    batches = draw_batches(rng, tokenizer, answers, SHORT_FORMS) + draw_batches(rng, tokenizer, answers, (None,))
    model = init_tiny(architecture(tokenizer.get_vocab_size()), "lm", seed)
    cycle = OneCycle(model, MUON_RATE, ADAMW_RATE, len(batches))
    losses: list[float] = []
    for number, batch in enumerate(batches):
        loss = response_loss(model, batch)
        cycle.step(loss)
        losses.append(loss.item())
        progress((number + 1) / len(batches))
    tail = losses[-max(1, len(losses) // 10) :]
    return model, sum(tail) / len(tail)


def draw_batches(rng: random.Random, tokenizer: Tokenizer, answers: int, forms: Sequence[str | None]) -> list[list[Row]]:
    """Batches of responses of similar length, in random order; a form of None is drawn by its share of prompts."""
    prompts = [draw_prompt(rng, rng.choice(forms)) for _ in range(answers)]
    rows = [encode_row(tokenizer, prompt, draw_response(rng, prompt)) for prompt in prompts]
    batches = batch_by_length(rows, lambda row: len(row.tokens), BATCH_TOKENS)
    rng.shuffle(batches)
    return batches


def response_loss(model: TinyTransformer, rows: list[Row]) -> Tensor:
    """Mean cross-entropy of response tokens (including `<eos>`), nats."""
    tokens_NT, positions_NT, lengths_N = pad(rows)
    starts_N = torch.tensor([row.prompt_length for row in rows])
    targets_NT = tokens_NT[:, 1:]
    position_NT = positions_NT[:, 1:]
    response_NT = (position_NT >= starts_N[:, None]) & (position_NT < lengths_N[:, None])
    hidden = model.hidden(tokens_NT[:, :-1], positions_NT[:, :-1])
    return F.cross_entropy(model.logits(hidden[response_NT]), targets_NT[response_NT])
