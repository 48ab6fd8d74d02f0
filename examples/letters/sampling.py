"""Sampling of responses for reports and benchmarks; the engine has its own decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from oppo_core.models.cache import SlotCache
from oppo_core.models.protocol import Network

from .batches import Row, pad
from .vocabulary import EOS, token_id


@torch.no_grad()
def sample_responses(
    model: Network, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int, seed: int, temperature: float = 1.0
) -> list[list[int]]:
    """One sampled response per prompt, as token ids, including `<eos>` if it was reached."""
    generator = torch.Generator().manual_seed(seed)
    rows = [Row(ids := tokenizer.encode(prompt).ids, len(ids)) for prompt in prompts]
    tokens_NT, positions_NT, lengths_N = pad(rows)
    cache = SlotCache(model.cache_shape, len(rows), tokens_NT.shape[1] + max_new_tokens, next(iter(model.parameters())))
    live_N = torch.arange(len(rows))
    hidden = model.hidden(tokens_NT, positions_NT, cache.window(live_N, positions_NT, tokens_NT.shape[1]))
    last_NH = hidden[live_N, lengths_N - 1]
    responses: list[list[int]] = [[] for _ in rows]
    for step in range(max_new_tokens):
        drawn_N = sample(model.logits(last_NH) / temperature, generator)
        for slot, token in zip(live_N.tolist(), drawn_N.tolist(), strict=True):
            responses[slot].append(token)
        active_N = drawn_N != token_id(EOS)
        live_N, drawn_N = live_N[active_N], drawn_N[active_N]
        if len(live_N) == 0 or step + 1 == max_new_tokens:
            break
        position_N1 = (lengths_N[live_N] + step)[:, None]
        window = cache.window(live_N, position_N1, int(position_N1.max()) + 1)
        last_NH = model.hidden(drawn_N[:, None], position_N1, window)[:, 0]
    return responses


def sample(logits_NV: Tensor, generator: torch.Generator) -> Tensor:
    """One sampled token per row [N]."""
    return torch.multinomial(logits_NV.softmax(-1), 1, generator=generator)[:, 0]


def decode_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text of a response without special tokens, as a rule receives it."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
