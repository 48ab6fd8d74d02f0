"""Micro-batching: groups ragged rows into padded or packed passes within a token budget."""

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

# Fixed cost of a forward pass, in tokens (measured: hidden 64, one thread).
PASS_COST_TOKENS = 96
# Attention over this many columns costs a token about as much as everything else (measured likewise).
COLUMNS_PER_TOKEN = 200
# Of a GPU: seconds to launch a layer's kernels, measured in transformers' loop on an H100's host
# (docs/measurements/2026-11-27.md); and FLOP/s of a large matrix product, which is assumed.
GPU_LAUNCH_S_PER_LAYER = 1.5e-3
GPU_FLOPS = 4e14


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Fixed cost of a pass in tokens, and the columns at which attention costs a token as much as all else."""

    a_pass: float = PASS_COST_TOKENS
    columns: float = COLUMNS_PER_TOKEN


def costs_on_gpu(layers: int, weights: int, width: int) -> PassCosts:
    """Pass costs on a GPU, where small networks are launch-bound: a further pass costs as much as many tokens.

    A token takes 2 FLOPs per weight (about 12 · layers · width² weights) and 4 · layers · width FLOPs per column.
    """
    return PassCosts(layers * GPU_LAUNCH_S_PER_LAYER * GPU_FLOPS / (2 * max(1, weights)), 6 * width)


def pass_costs(network: Network) -> PassCosts:
    """Costs of a pass through `network` on its device."""
    parameters = list(network.parameters())
    if parameters[0].device.type != "cuda":
        return PassCosts()
    return costs_on_gpu(len(network.cache_shape.layers), sum(p.numel() for p in parameters), network.width)


CPU_COSTS = PassCosts()
# The shortest row that can be trained: tokens and prompt lengths of a prompt and a response of one token each.
ONE_TOKEN = ([np.zeros(2, dtype=np.int64)], [1])


def ragged_batches(
    lengths: Rows[int], budget: int, columns: Rows[int] | None = None, costs: PassCosts = CPU_COSTS
) -> list[list[int]]:
    """Group rows to minimize the sum of padding and pass costs, each group within `budget` padded tokens.

    Dynamic programming over the rows sorted by (columns, length, index), where `columns` are the positions that a row attends
    to (default: its length). A group costs `costs.a_pass` + rows × longest × (1 + most columns ÷ `costs.columns`). A row longer
    than the budget forms its own group. Rows of length 0 are omitted.

    Returns:
        Lists of row indices; a function of the arguments only.
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
    """Group rows into packs of at most `budget` tokens by first-fit decreasing.

    A row longer than the budget forms its own group. Rows of length 0 are omitted. Groups and their rows are in the order of row
    indices; the result is a function of the arguments only.
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
    """Rows of token ids as one right-padded tensor [N, longest]."""
    padded = np.full((len(rows), max(len(row) for row in rows)), fill, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(padded)


def mini_batch_rows(batch: int, mini_batches: int, seed: int, step: int, epoch: int, group: int = 1) -> list[list[int]]:
    """Split rows 0…batch−1 into equal mini-batches, shuffled by (seed, step, epoch) if there is more than one.

    Each `group` adjacent rows stay together.
    """
    order = np.arange(batch // group)
    if mini_batches > 1:
        generator(seed, Use.MINI_BATCHES, (step << 16) + epoch).shuffle(order)
    return [
        [number * group + member for number in sorted(part.tolist()) for member in range(group)]
        for part in np.split(order, mini_batches)
    ]


def response_states(network: Network, tokens: list[NDArray[np.int64]], prompt_lengths: list[int], packs: bool = False) -> Tensor:
    """States [M, H] that predict the M response tokens of some sequences, concatenated.

    The state at position p−1 predicts the token at position p. One forward pass over the rows, right-padded or, with `packs`,
    packed into one row.
    """
    device = next(network.parameters()).device
    if packs:
        hidden, starts = _packed_states(network, tokens, device)
    else:
        padded = to_device(right_padded(tokens), device)
        hidden = network.hidden(padded, torch.arange(padded.shape[1], device=device).expand_as(padded))
        starts = np.arange(len(tokens)) * padded.shape[1]
    indices = np.concatenate(
        [start + np.arange(prompt - 1, len(ids) - 1) for start, ids, prompt in zip(starts, tokens, prompt_lengths, strict=True)]
    )
    return hidden.flatten(0, 1).index_select(0, to_device(indices, device))


def _packed_states(network: Network, tokens: list[NDArray[np.int64]], device: torch.device) -> tuple[Tensor, NDArray[np.int64]]:
    """States [1, T, H] of the packed rows, and the start of each row."""
    lengths = [len(ids) for ids in tokens]
    packed = to_device(np.concatenate(tokens), device)[None]
    positions = to_device(np.concatenate([np.arange(length) for length in lengths]), device)[None]
    return network.hidden(packed, positions, Packed.of(lengths, device)), np.cumsum([0, *lengths[:-1]])
