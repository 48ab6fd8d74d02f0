"""The roofline floor of a step: bytes moved and operations, divided by the device's measured rates.

Both rates, bytes and operations per second, are measured in the same run by a large copy and a large matrix product in the
weights' precision. A stage's floor is the larger of bytes ÷ bandwidth and operations ÷ rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from oppo_bench.engine.workload import Size
from oppo_core.trace.gpu_stats import stated_flops

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 25}
PRODUCT_WIDTH = {"cuda": 8192, "cpu": 512}
TRIES = 5
WIDTH = {"bfloat16": 2, "float32": 4}
# Memory traffic of one trained weight in an optimizer step: gradient, master and two moments read; master, moments and weight
# written.
UPDATE_BYTES = {"bfloat16": 4 * 4 + 3 * 4 + 2, "float32": 4 * 4 + 3 * 4}
BACKWARD = 2  # times a forward pass: half of it for the gradients of the weights


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes (read or written) and operations per second that the device reached, and its vendor's values."""

    bytes_per_s: float
    flops_per_s: float
    stated_flops_per_s: float | None

    @classmethod
    def measured(cls, device: torch.device, dtype: torch.dtype) -> Self:
        """The best of a few tries each."""
        source = torch.randn(COPY_BYTES[device.type] // 4, device=device)
        target = torch.empty_like(source)
        copy_s = _best(lambda: target.copy_(source), device)
        n = PRODUCT_WIDTH[device.type]
        # Random, because a GPU multiplies equal numbers faster: they take less power.
        left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        product_s = _best(lambda: torch.mm(left, right), device)
        stated = stated_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return cls(2 * COPY_BYTES[device.type] / copy_s, 2 * n**3 / product_s, stated)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few tries, after a warm-up."""
    work()
    taken = []
    for _ in range(TRIES):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken)


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one step. `rows`: (prompt, response) tokens of every trained answer; rounds and decoded tokens are its own."""

    rows: list[tuple[int, int]]
    rounds: int
    decoded: int


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes and operations."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Need) -> Need:
        return Need(self.bytes + other.bytes, self.flops + other.flops)

    def seconds(self, ceilings: Ceilings) -> float:
        """Minimum time if the two overlap perfectly."""
        return max(self.bytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)


def needs(size: Size, work: Work, trained_share: float = 1.0) -> dict[str, Need]:
    """Bytes and operations of each stage. Weights are read once per decode round, and once in total by every other stage.

    `trained_share`: share of weights that the optimizers step (adapters: about 0); others need no gradient.
    """
    weights = size.parameters * WIDTH[size.dtype]
    response, tokens = sum(n for _, n in work.rows), sum(p + n for p, n in work.rows)
    contexts = sum(n * p + n * (n + 1) / 2 for p, n in work.rows) / max(1, response)  # of a response token, on average
    cached = size.layers * 2 * size.key_heads * (size.hidden // size.heads) * WIDTH[size.dtype]
    body, head = size.parameters - size.vocab * size.hidden, size.vocab * size.hidden
    looked = 4.0 * size.layers * size.hidden
    decode = Need(
        work.rounds * weights + work.decoded * contexts * cached, work.decoded * (2 * (body + head) + looked * contexts)
    )
    attention = looked * sum((p + n) * (p + n + 1) / 2 for p, n in work.rows)
    with_logits = 2.0 * body * tokens + 2.0 * head * response + attention
    without = 2.0 * body * tokens + attention
    backward = BACKWARD * (1 + trained_share) / 2
    update = Need(trained_share * size.parameters * UPDATE_BYTES[size.dtype])
    return {
        "decode": decode,
        "score": Need(3 * weights, with_logits + 2 * without),
        "update_actor": Need(weights, (1 + backward) * with_logits) + update,
        "update_critic": Need(weights, backward * without) + update,  # its forward pass is among the scores
    }


def floors(stages: dict[str, Need], ceilings: Ceilings, overlaps: bool) -> dict[str, float]:
    """Minimum seconds per stage and of the step: stages one after another, or decoding and scoring at the same time."""
    least = {name: need.seconds(ceilings) for name, need in stages.items()}
    if not overlaps:
        return least | {"step": sum(least.values())}
    together = (stages["decode"] + stages["score"]).seconds(ceilings)
    return least | {"step": together + least["update_actor"] + least["update_critic"]}


def model_flops(stages: dict[str, Need]) -> float:
    """Operations that the step's results need, none counted twice."""
    return sum(need.flops for need in stages.values())
