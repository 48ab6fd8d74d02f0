"""Padded batches of token rows of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .vocabulary import EOS, PAD, token_id

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of a prompt and its response; `prompt_length` includes `<bos>` and `<sep>`."""

    tokens: list[int]
    prompt_length: int


def encode_row(tokenizer: Tokenizer, prompt: str, response: str, *, ended: bool = True) -> Row:
    """`<bos> prompt <sep> response <eos>`; without `<eos>` if not `ended`."""
    head = tokenizer.encode(prompt).ids
    body = tokenizer.encode(response, add_special_tokens=False).ids
    return Row(head + body + ([token_id(EOS)] if ended else []), len(head))


def pad(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded tokens [N, T], positions [N, T] and lengths [N]."""
    lengths_N = torch.tensor([len(row.tokens) for row in rows])
    width = int(lengths_N.max())
    tokens_NT = torch.tensor([row.tokens + [token_id(PAD)] * (width - len(row.tokens)) for row in rows])
    return tokens_NT, torch.arange(width).expand(len(rows), width), lengths_N


def batch_by_length(items: Iterable[Item], length: Callable[[Item], int], budget: int) -> list[list[Item]]:
    """Batches of items of similar length, shortest first, of at most `budget` padded tokens and at least one item."""
    batches: list[list[Item]] = []
    for item in sorted(items, key=length):
        if batches and (len(batches[-1]) + 1) * length(item) <= budget:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches
