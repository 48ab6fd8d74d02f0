"""Builds vLLM's decoder from a run's spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from oppo_contract.spec import RunSpec
from oppo_core.models.protocol import Network
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.stop_conditions import StopConditions
from oppo_core.vllm.asyncio_thread import AsyncioThread
from oppo_core.vllm.engine_args import (
    FILE_BACKEND,
    Placement,
    cpu_cache_bytes,
    engine_arguments,
    lora_arguments,
    vllm_environment,
)
from oppo_core.vllm.protocols import AsyncEngine
from oppo_core.vllm.subprocess_decoder import StreamingDecoder
from oppo_core.vllm.weight_transfer import connect

# Loading a large model, profiling its memory and capturing CUDA graphs takes minutes.
START_TIMEOUT_S = 1800.0
# Tokens per message from the engine's process. More would delay scoring, fewer cost more messages.
STREAM_INTERVAL = 8


def decoding_gpus(spec: RunSpec, device: int) -> list[int]:
    """Indices of the GPUs that only vLLM uses: ranks train and score on the node's first GPUs and share the rest equally.

    Args:
        device: this rank's own GPU.
    """
    ranks, each = spec.resources.ranks_per_node, spec.resources.decoding_devices // spec.resources.ranks_per_node
    first = ranks + spec.resources.scoring_devices + device * each
    return list(range(first, first + each))


def decoder_placement(spec: RunSpec, network: Network, slots: int, device: torch.device) -> Placement:
    """vLLM's GPUs, by default the rank's own (`device`), or the CPU with a KV cache for `slots` responses."""
    if device.type == "cuda":
        own = decoding_gpus(spec, device.index) or [device.index]
        return Placement(tuple(own), spec.rollout.vllm_memory_share)
    longest = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    per_token = network.cache_shape.numbers * next(network.parameters()).element_size()
    return Placement(cache_bytes=cpu_cache_bytes(slots, longest, per_token))


def build_decoder(
    spec: RunSpec, folder: Path, network: Network, settings: DecodeSettings, stops: StopConditions | None, slots: int,
    device: torch.device,
) -> StreamingDecoder:  # fmt: skip
    """A decoder whose engine starts from the model in `folder` and receives its weights from `network`, on `device`.

    Raises:
        ImportError: vLLM is not installed.
        VllmError: it does not start, or cannot receive weights.
    """
    assert isinstance(network, nn.Module)
    devices, sleeps = spec.resources.decoding_devices // spec.resources.ranks_per_node, spec.rollout.vllm_sleep
    placement = decoder_placement(spec, network, slots, device)
    on_gpu = bool(placement.gpus)
    lora = spec.models.lora
    arguments = engine_arguments(str(folder), spec.resources.dtype, settings, slots, sleeps, placement)
    if lora is not None:
        arguments |= lora_arguments(lora.rank)
    backend = transfer_backend(spec, on_gpu)
    loop = AsyncioThread(spec.resources.longest_silence_s)
    engine: AsyncEngine | None = None
    try:
        with vllm_environment(placement, loop.resources, handles=backend == "ipc"):
            engine = start_engine_process(loop, arguments, backend)
            weight_transfer = connect(engine, loop, network, devices, on_gpu)
    except BaseException:
        if engine is not None:
            engine.shutdown()
        loop.close()
        raise
    interval = min(spec.initial_chunk_size, STREAM_INTERVAL)
    return StreamingDecoder(
        engine, loop, settings, weight_transfer, stops, interval, sleeps=sleeps, draws_by_position=on_gpu
    )  # fmt: skip


def transfer_backend(spec: RunSpec, on_gpu: bool) -> str | None:
    """vLLM's name of the transfer of weights; None: adapters need none."""
    if spec.models.lora is not None:
        return None
    return ("nccl" if spec.resources.decoding_devices else "ipc") if on_gpu else FILE_BACKEND


def start_engine_process(loop: AsyncioThread, arguments: dict[str, Any], backend: str | None) -> AsyncEngine:
    """Start vLLM's engine in another process. Call within `vllm_environment`.

    Args:
        arguments: see `engine_arguments`.
        backend: see `transfer_backend`.

    Raises:
        ImportError: vLLM is not installed.
        VllmError: it does not start.
    """
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if backend == FILE_BACKEND:
        import oppo_core.vllm.file_transfer  # noqa: F401 - registers FILE_BACKEND
    if backend is not None:
        arguments = arguments | {"weight_transfer_config": WeightTransferConfig(backend=backend)}

    async def start() -> AsyncEngine:
        started: AsyncEngine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        return started

    return loop.run(start(), "starting", START_TIMEOUT_S)
