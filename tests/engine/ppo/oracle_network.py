"""The oracle's transformer: one sequence, one head at a time, without padding or batching."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    """Layer norm over the last axis."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attention(x_TH: Tensor, weights: Weights, block: str, heads: int) -> Tensor:
    """Causal attention of one sequence, head by head."""
    tokens, hidden = x_TH.shape
    width = hidden // heads
    query, keys, values = (x_TH @ weights[f"{block}.qkv.weight"].T + weights[f"{block}.qkv.bias"]).split(hidden, -1)
    hide = torch.triu(torch.full((tokens, tokens), -math.inf, dtype=x_TH.dtype), diagonal=1)
    mixed = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        mixed.append(torch.softmax(query[:, part] @ keys[:, part].T / math.sqrt(width) + hide, -1) @ values[:, part])
    return torch.cat(mixed, -1) @ weights[f"{block}.out.weight"].T + weights[f"{block}.out.bias"]


def states(weights: Weights, tokens: list[int], heads: int) -> Tensor:
    """Hidden states [T, H] of one sequence."""
    x = weights["embedding.weight"][tokens] + weights["position.weight"][: len(tokens)]
    for number in range(sum(name.endswith("qkv.weight") for name in weights)):
        block = f"blocks.{number}"
        x = x + attention(norm(x, weights, f"{block}.norm1"), weights, block, heads)
        inner = norm(x, weights, f"{block}.norm2") @ weights[f"{block}.up.weight"].T + weights[f"{block}.up.bias"]
        inner = 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2)))
        x = x + inner @ weights[f"{block}.down.weight"].T + weights[f"{block}.down.bias"]
    return norm(x, weights, "norm")


def grown_states(weights: list[Weights], tokens: list[int], heads: int) -> Tensor:
    """Hidden states [T, H] of one sequence computed token by token, position p with `weights[p]`.

    The KV cache is kept: newer weights attend to keys and values of older ones.
    """
    cache: dict[str, list[tuple[Tensor, Tensor]]] = {}
    return torch.stack([grown_state(w, token, p, heads, cache) for p, (w, token) in enumerate(zip(weights, tokens, strict=True))])


def grown_state(w: Weights, token: int, position: int, heads: int, cache: dict[str, list[tuple[Tensor, Tensor]]]) -> Tensor:
    """The next hidden state [H]; its keys and values join `cache`."""
    x = w["embedding.weight"][token] + w["position.weight"][position]
    for number in range(sum(name.endswith("qkv.weight") for name in w)):
        block = f"blocks.{number}"
        qkv = norm(x, w, f"{block}.norm1") @ w[f"{block}.qkv.weight"].T + w[f"{block}.qkv.bias"]
        query, key, value = (part.view(heads, -1) for part in qkv.chunk(3))
        past = cache.setdefault(block, [])
        past.append((key, value))
        mixed = []
        for head in range(heads):
            scores = torch.stack([query[head] @ k[head] for k, _ in past]) / math.sqrt(key.shape[1])
            mixed.append(torch.softmax(scores, -1) @ torch.stack([v[head] for _, v in past]))
        x = x + torch.cat(mixed) @ w[f"{block}.out.weight"].T + w[f"{block}.out.bias"]
        inner = norm(x, w, f"{block}.norm2") @ w[f"{block}.up.weight"].T + w[f"{block}.up.bias"]
        x = x + 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2))) @ w[f"{block}.down.weight"].T + w[f"{block}.down.bias"]
    return norm(x, w, "norm")
