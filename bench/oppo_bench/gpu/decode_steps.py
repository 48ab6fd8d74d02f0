"""Time of one decode step on the device: transformers' `generate`, the decoder that launches every kernel, and CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from oppo_bench.document import Result
from oppo_bench.engine.workload import CONTEXT, PROMPT_TOKENS, VOCAB
from oppo_bench.gpu.floor import synchronize
from oppo_core.models.attention import FUSED
from oppo_core.models.huggingface import HuggingFaceNetwork
from oppo_core.rollout.decoder import Decoder, DecodeSettings
from oppo_core.rollout.sequence import Sequence

ROWS, WARM_UP, STEPS, REPETITIONS = 32, 8, 32, 3
MS = 1e3


def measure(size: str, network: HuggingFaceNetwork, kind: type[Decoder]) -> list[Result]:
    """Milliseconds of a decode step over `ROWS` rows with short contexts, named `{size}/decode_step_ms/{decoder}`.

    `kind` is the decoder that the engine chose for the device.
    """
    taken = {each.__name__: _advance(each, network) for each in (Decoder, kind)} | {"transformers": _generate(network)}
    return [Result.of(f"{size}/decode_step_ms/{name}", "ms", values) for name, values in taken.items()]


def line(results: list[Result], layers: int) -> str:
    """A line of output."""
    each = (f"{r.name.rpartition('/')[2]} {r.median:.2f} ms ({1e3 * r.median / layers:.0f} µs a layer)" for r in results)
    return f"a decode step over {ROWS} rows: {', '.join(each)}"


def _prompts() -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.random.Generator(np.random.Philox(key=[11, 0])).integers(3, VOCAB, (ROWS, PROMPT_TOKENS))


def _advance(kind: type[Decoder], network: HuggingFaceNetwork) -> list[float]:
    """Milliseconds a step of blocks of `STEPS` steps."""
    tokens = WARM_UP + REPETITIONS * STEPS
    decoder = kind(network, DecodeSettings(1, -1, 1.0, CONTEXT - 512, tokens + 1, 4096), ROWS)
    decoder.begin([Sequence(row, 0, prompt) for row, prompt in enumerate(_prompts())])
    decoder.advance(WARM_UP, 0)
    device = next(network.parameters()).device
    return [_seconds(lambda: decoder.advance(STEPS, 0), device) * MS / STEPS for _ in range(REPETITIONS)]


def _generate(network: HuggingFaceNetwork) -> list[float]:
    """The same for sampling by `generate` with a growing cache: the difference between a long and a short answer."""
    device = next(network.parameters()).device
    prompts = torch.from_numpy(_prompts()).to(device)
    model = network.model

    def answer(tokens: int) -> None:
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
        )

    model.set_attn_implementation("sdpa")
    try:
        answer(WARM_UP)
        taken = []
        for _ in range(REPETITIONS):
            short, long = (_seconds(lambda n=n: answer(n), device) for n in (WARM_UP, WARM_UP + STEPS))  # type: ignore[misc]
            taken.append((long - short) * MS / STEPS)
        return taken
    finally:
        model.set_attn_implementation(FUSED)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start
