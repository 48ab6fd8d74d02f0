"""Answers of a model, as text: for reports and benches. The engine samples for itself."""

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
def sample_answers(
    model: Network, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int, seed: int, temperature: float = 1.0
) -> list[list[int]]:
    """One sampled answer a prompt, as token ids, `<eos>` included where it was reached."""
    generator = torch.Generator().manual_seed(seed)
    rows = [Row(ids := tokenizer.encode(prompt).ids, len(ids)) for prompt in prompts]
    tokens_NT, positions_NT, lengths_N = pad(rows)
    cache = SlotCache(model.cache_shape, len(rows), tokens_NT.shape[1] + max_new_tokens, next(iter(model.parameters())))
    live_N = torch.arange(len(rows))
    hidden = model.hidden(tokens_NT, positions_NT, cache.window(live_N, positions_NT, tokens_NT.shape[1]))
    last_NH = hidden[live_N, lengths_N - 1]
    answers: list[list[int]] = [[] for _ in rows]
    for step in range(max_new_tokens):
        drawn_N = draw(model.logits(last_NH) / temperature, generator)
        for slot, token in zip(live_N.tolist(), drawn_N.tolist(), strict=True):
            answers[slot].append(token)
        going_N = drawn_N != token_id(EOS)
        live_N, drawn_N = live_N[going_N], drawn_N[going_N]
        if len(live_N) == 0 or step + 1 == max_new_tokens:
            break
        place_N1 = (lengths_N[live_N] + step)[:, None]
        window = cache.window(live_N, place_N1, int(place_N1.max()) + 1)
        last_NH = model.hidden(drawn_N[:, None], place_N1, window)[:, 0]
    return answers


def draw(logits_NV: Tensor, generator: torch.Generator) -> Tensor:
    """One token [N] a row."""
    return torch.multinomial(logits_NV.softmax(-1), 1, generator=generator)[:, 0]


def as_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The words of an answer, special tokens left out: what a rule is given."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
