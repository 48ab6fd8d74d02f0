"""Teaches the actor the language: answers of the form asked for, in any mood."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from oppo_contract.spec import TinyArchitecture
from oppo_core.models.tiny import TinyTransformer, init_tiny

from .batches import Row, encode_row, like_lengths, pad
from .grammar import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, draw_answer, draw_prompt

BATCH_TOKENS = 640  # many small steps learn more a second than few large ones
PEAK_LEARNING_RATE = 8e-3
WARMUP_SHARE = 0.05


def architecture(vocab: int) -> TinyArchitecture:
    """The size of actor and reward model: as small as learns the task."""
    return TinyArchitecture(hidden=64, layers=2, heads=4, context=MAX_PROMPT_TOKENS + MAX_NEW_TOKENS, vocab=vocab)


def pretrain(tokenizer: Tokenizer, answers: int, seed: int, progress: Callable[[float], None]) -> tuple[TinyTransformer, float]:
    """Train a causal language model on `answers` generated answers, one pass.

    Args:
        progress: called with the share done, 0 … 1.

    Returns:
        The model, and its mean loss over the last tenth of the batches, nats a token.
    """
    rng = random.Random(seed)
    prompts = [draw_prompt(rng) for _ in range(answers)]
    rows = [encode_row(tokenizer, prompt, draw_answer(rng, prompt)) for prompt in prompts]
    batches = like_lengths(rows, lambda row: len(row.tokens), BATCH_TOKENS)
    rng.shuffle(batches)
    model = init_tiny(architecture(tokenizer.get_vocab_size()), "lm", seed)
    optimizer, schedule = one_cycle(model, PEAK_LEARNING_RATE, len(batches))
    losses: list[float] = []
    for number, batch in enumerate(batches):
        loss = answer_loss(model, batch)
        take_step(model, loss, optimizer)
        schedule.step()
        losses.append(loss.item())
        progress((number + 1) / len(batches))
    tail = losses[-max(1, len(losses) // 10) :]
    return model, sum(tail) / len(tail)


def answer_loss(model: TinyTransformer, rows: list[Row]) -> Tensor:
    """Mean cross-entropy of the answers' tokens (`<eos>` included, prompts not), nats."""
    tokens_NT, positions_NT, lengths_N = pad(rows)
    starts_N = torch.tensor([row.prompt_length for row in rows])
    targets_NT = tokens_NT[:, 1:]
    place_NT = positions_NT[:, 1:]
    wanted_NT = (place_NT >= starts_N[:, None]) & (place_NT < lengths_N[:, None])
    hidden = model.hidden(tokens_NT[:, :-1], positions_NT[:, :-1])
    return F.cross_entropy(model.logits(hidden[wanted_NT]), targets_NT[wanted_NT])


def one_cycle(
    model: TinyTransformer, peak: float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with a short linear warm-up and a linear way down to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    warm = max(1, int(WARMUP_SHARE * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warm, max(0.0, 1 - step / steps)))
    return optimizer, schedule


def take_step(model: TinyTransformer, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Backward, clip, update."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
