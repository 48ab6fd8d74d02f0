"""Builds vLLM's decoder from a run's spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from oppo_contract.spec import RunSpec
from oppo_core.models.adapters import iter_merged_weights
from oppo_core.models.protocol import Network
from oppo_core.rollout.decoder import DecoderProtocol, DecodeSettings
from oppo_core.rollout.stop_conditions import StopConditions
from oppo_core.vllm.asyncio_thread import AsyncioThread
from oppo_core.vllm.engine_args import (
    IPC_ENVIRONMENT,
    SUBPROCESS_ENVIRONMENT,
    engine_arguments,
    prepare,
    process_arguments,
)
from oppo_core.vllm.inprocess import InProcessDecoder, start_engine
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


def build_decoder(
    spec: RunSpec, folder: Path, network: Network, settings: DecodeSettings, stops: StopConditions | None, slots: int, device: int
) -> DecoderProtocol:  # fmt: skip
    """A decoder whose engine starts from the model in `folder` and receives its weights from `network`, on GPU `device`.

    Raises:
        ImportError: vLLM is not installed.
        VllmError: it does not start, or cannot receive weights.
    """
    assert isinstance(network, nn.Module)
    weights: nn.Module = network
    rollout, own = spec.rollout, decoding_gpus(spec, device)
    share, sleeps = rollout.vllm_memory_share, rollout.vllm_sleep
    arguments = engine_arguments(str(folder), spec.resources.dtype, settings, slots, share, sleeps, own or [device])
    if rollout.vllm_process == "engine":
        return InProcessDecoder(start_engine(arguments), settings, lambda: iter_merged_weights(weights), stops, sleeps=sleeps)
    return _build_in_process(spec, weights, settings, stops, process_arguments(arguments), len(own))


def _build_in_process(
    spec: RunSpec, weights: nn.Module, settings: DecodeSettings, stops: StopConditions | None, arguments: dict[str, Any],
    devices: int,
) -> StreamingDecoder:  # fmt: skip
    loop = AsyncioThread(spec.resources.longest_silence_s)
    engine: AsyncEngine | None = None
    try:
        engine = start_engine_process(loop, arguments, devices)
        weight_transfer = connect(engine, loop, weights, devices)
    except BaseException:
        if engine is not None:
            engine.shutdown()
        loop.close()
        raise
    interval = min(spec.overlap.chunk.size, STREAM_INTERVAL)
    return StreamingDecoder(engine, loop, settings, weight_transfer, stops, interval, sleeps=spec.rollout.vllm_sleep)


def start_engine_process(loop: AsyncioThread, arguments: dict[str, Any], devices: int) -> AsyncEngine:
    """Start vLLM's engine in another process, configured for weight transfer.

    Args:
        arguments: see `process_arguments`.
        devices: GPUs of its own; 0 if it shares the trainer's.

    Raises:
        ImportError: vLLM is not installed.
        VllmError: it does not start.
    """
    prepare(SUBPROCESS_ENVIRONMENT if devices else SUBPROCESS_ENVIRONMENT | IPC_ENVIRONMENT)
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = WeightTransferConfig(backend="nccl" if devices else "ipc")

    async def start() -> AsyncEngine:
        started: AsyncEngine = AsyncLLM.from_engine_args(AsyncEngineArgs(weight_transfer_config=config, **arguments))
        return started

    return loop.run(start(), "starting", START_TIMEOUT_S)
