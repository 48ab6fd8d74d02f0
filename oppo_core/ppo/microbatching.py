"""Ragged rows to padded batches, with as little padding as pays."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.host_device import to_device
from oppo_core.models.packed import Packed
from oppo_core.models.protocol import Network
from oppo_core.rng import Use, generator

# A forward pass costs about as much as this many tokens before its first token (measured: hidden 64, one thread).
PASS_COST_TOKENS = 96
# Attention over this many columns costs a token about as much as everything else (measured likewise).
COLUMNS_PER_TOKEN = 200
# Assumed, not measured, of a GPU: time to launch a layer's kernels, in seconds, and operations a second in a large product.
GPU_LAUNCH_S_A_LAYER = 2e-4
GPU_OPERATIONS_A_S = 4e14


@dataclass(frozen=True, slots=True)
class PassCosts:
    """What a pass costs besides its tokens, in tokens; and the columns at which attention costs a token as much as all else."""

    a_pass: float = PASS_COST_TOKENS
    columns: float = COLUMNS_PER_TOKEN


def costs_on_gpu(layers: int, weights: int, width: int) -> PassCosts:
    """A small network's pass there is over before the next kernel is launched: one more pass costs as much as many tokens.

    A token takes 2 operations a weight, of which there are about 12 · layers · width², and 4 · layers · width a column.
    """
    return PassCosts(layers * GPU_LAUNCH_S_A_LAYER * GPU_OPERATIONS_A_S / (2 * max(1, weights)), 6 * width)


def pass_costs(network: Network) -> PassCosts:
    """Of a pass through `network` on the device where it is."""
    parameters = list(network.parameters())
    if parameters[0].device.type != "cuda":
        return PassCosts()
    return costs_on_gpu(len(network.cache_shape.layers), sum(p.numel() for p in parameters), network.width)


ON_A_CPU = PassCosts()


def ragged_batches(
    lengths: Rows[int], budget: int, columns: Rows[int] | None = None, costs: PassCosts = ON_A_CPU
) -> list[list[int]]:
    """Group rows so that padding and the cost of a pass are least in sum, each group within `budget` padded tokens.

    By dynamic programming over the rows sorted by (columns, length, index), where `columns` are the positions a row's
    attention looks at (default: its length). A group costs `costs.a_pass`, and rows × longest × (1 + most columns ÷
    `costs.columns`). A row longer than the budget stands alone. Rows of length 0 are left out.

    Returns:
        Lists of row indices; depends on the arguments alone.
    """
    seen = lengths if columns is None else columns
    order = sorted((row for row in range(len(lengths)) if lengths[row] > 0), key=lambda row: (seen[row], lengths[row], row))
    best = [0.0] + [float("inf")] * len(order)
    start = [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        longest, weight = 0, 1 + seen[order[end - 1]] / costs.columns
        for begin in range(end - 1, -1, -1):
            longest = max(longest, lengths[order[begin]])
            padded = (end - begin) * longest
            if padded > budget and end - begin > 1:
                break
            cost = best[begin] + costs.a_pass + padded * weight
            if cost < best[end]:
                best[end], start[end] = cost, begin
    groups, end = [], len(order)
    while end:
        groups.append(order[start[end] : end])
        end = start[end]
    return groups[::-1]


def packed_batches(lengths: Rows[int], budget: int) -> list[list[int]]:
    """Group rows so that each group has at most `budget` tokens: the longest first, each into the first group with room for it.

    A row longer than the budget stands alone. Rows of length 0 are left out. Groups and their rows are in the order of row
    indices; the result depends on the arguments alone.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for row in sorted((row for row in range(len(lengths)) if lengths[row] > 0), key=lambda row: (-lengths[row], row)):
        place = next((n for n, left in enumerate(room) if left >= lengths[row]), len(groups))
        if place == len(groups):
            groups.append([])
            room.append(budget)
        groups[place].append(row)
        room[place] -= lengths[row]
    return sorted(sorted(group) for group in groups)


def right_padded(rows: list[NDArray[np.int64]], fill: int = 0) -> Tensor:
    """Rows of token ids as one tensor [N, longest]."""
    padded = np.full((len(rows), max(len(row) for row in rows)), fill, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(padded)


def mini_batch_rows(batch: int, mini_batches: int, seed: int, step: int, epoch: int, group: int = 1) -> list[list[int]]:
    """Split rows 0…batch−1 into equal mini-batches; shuffled by (seed, step, epoch) when there is more than one.

    `group` rows that follow each other stay together.
    """
    order = np.arange(batch // group)
    if mini_batches > 1:
        generator(seed, Use.MINI_BATCHES, (step << 16) + epoch).shuffle(order)
    return [
        [number * group + member for number in sorted(part.tolist()) for member in range(group)]
        for part in np.split(order, mini_batches)
    ]


def response_states(network: Network, tokens: list[NDArray[np.int64]], prompt_lengths: list[int], packs: bool = False) -> Tensor:
    """States [M, H] that predict the response tokens of some sequences, one after the other, M tokens in all.

    A response token at position p is predicted from position p−1. One forward pass over the rows: side by side, right-padded, or
    `packs`: behind each other.
    """
    device = next(network.parameters()).device
    if packs:
        hidden, starts = _packed_states(network, tokens, device)
    else:
        padded = to_device(right_padded(tokens), device)
        hidden = network.hidden(padded, torch.arange(padded.shape[1], device=device).expand_as(padded))
        starts = np.arange(len(tokens)) * padded.shape[1]
    wanted = np.concatenate(
        [start + np.arange(prompt - 1, len(ids) - 1) for start, ids, prompt in zip(starts, tokens, prompt_lengths, strict=True)]
    )
    return hidden.flatten(0, 1).index_select(0, to_device(wanted, device))


def _packed_states(network: Network, tokens: list[NDArray[np.int64]], device: torch.device) -> tuple[Tensor, NDArray[np.int64]]:
    """States [1, T, H] of the rows behind each other, and where each begins."""
    lengths = [len(ids) for ids in tokens]
    behind = to_device(np.concatenate(tokens), device)[None]
    positions = to_device(np.concatenate([np.arange(length) for length in lengths]), device)[None]
    return network.hidden(behind, positions, Packed.of(lengths, device)), np.cumsum([0, *lengths[:-1]])
