"""What a decoder says when the GPU has no room for what vLLM takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from oppo_contract.spec import TinyArchitecture
from oppo_core.models.tiny_transformer import TinyTransformer, init_tiny
from oppo_core.rollout.decoder import DecoderProtocol, DecodeSettings
from oppo_core.rollout.sequence import Sequence
from oppo_core.vllm.errors import VllmError
from tests.fakes.vllm_async_engine import streaming

SETTINGS = DecodeSettings(seed=3, eos=1, temperature=0.9, max_prompt=12, max_new=6, micro_batch_tokens=400)
SHORT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62"),
]
REMEDY = r"lower rollout\.vllm_memory_share, .+ out of memory"


def small_network() -> TinyTransformer:
    return init_tiny(TinyArchitecture(vocab=40, context=64, hidden=16, layers=2, heads=2), "lm", 0)


def failing(error: Exception) -> Any:
    def fail(*given: Any, **named: Any) -> None:
        raise error

    return fail


def asleep(decoder: DecoderProtocol) -> DecoderProtocol:
    decoder.begin([Sequence(0, 0, np.asarray([3, 4]))], 0)
    decoder.pause()
    return decoder


@pytest.mark.parametrize(
    ("error", "message"), [*((error, REMEDY) for error in SHORT), (RuntimeError("a bug"), "waking up: RuntimeError: a bug")]
)
def test_an_error_at_waking_up(error: Exception, message: str) -> None:
    """Out of memory has a remedy; other errors are reported as they are."""
    decoder = streaming(small_network(), SETTINGS, None, interval=4, handles=False, sleeps=True)
    try:
        asleep(decoder)
        decoder.engine.core.wake_up = failing(error)  # type: ignore[attr-defined]
        with pytest.raises(VllmError, match=message):
            decoder.begin([], 1)
    finally:
        decoder.close()
