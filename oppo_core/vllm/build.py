"""vLLM's decoder and reward model as a run's spec asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from oppo_contract.spec import RunSpec
from oppo_core.models.adapters import plain_weights
from oppo_core.models.protocol import Network
from oppo_core.rollout.decoder import DecoderProtocol, DecodeSettings
from oppo_core.rollout.stop_conditions import StopConditions
from oppo_core.vllm.asyncio_thread import Loop
from oppo_core.vllm.engine_args import APART, HANDLES, apart_arguments, engine_arguments, prepare, reads_no_handles
from oppo_core.vllm.inprocess import InProcessDecoder, start_engine
from oppo_core.vllm.protocols import AsyncEngine, PoolingEngine
from oppo_core.vllm.reward import PrefixReward, check_classifier
from oppo_core.vllm.subprocess_decoder import StreamingDecoder
from oppo_core.vllm.weight_transfer import connect

# Loading a large model, measuring its memory and capturing its graphs is silent.
STARTED_WITHIN_S = 1800.0
# Tokens that come together from another process. More would come later than they could be scored, fewer cost more words.
MOST_TOGETHER = 8


def own_places(spec: RunSpec, device: int) -> list[int]:
    """GPUs that are vLLM's own, by their numbers: ranks train and score on the node's first ones, and share the rest equally.

    Args:
        device: this rank's own GPU.
    """
    ranks, each = spec.resources.ranks_per_node, spec.resources.decoding_devices // spec.resources.ranks_per_node
    first = ranks + spec.resources.scoring_devices + device * each
    return list(range(first, first + each))


def build_decoder(
    spec: RunSpec, folder: Path, network: Network, settings: DecodeSettings, stops: StopConditions | None, slots: int, device: int
) -> DecoderProtocol:  # fmt: skip
    """A decoder whose engine is started from the model in `folder` and takes its weights from `network`, on GPU `device`.

    Raises:
        ImportError: vLLM is not installed.
        VllmError: it does not start, or cannot be handed weights.
    """
    assert isinstance(network, nn.Module)
    weights: nn.Module = network
    how, own = spec.rollout, own_places(spec, device)
    share, sleeps = how.vllm_memory_share, how.vllm_sleep
    arguments = engine_arguments(str(folder), spec.resources.dtype, settings, slots, share, sleeps, own or [device])
    if how.vllm_process == "engine":
        return InProcessDecoder(start_engine(arguments), settings, lambda: plain_weights(weights), stops, sleeps=sleeps)
    return _apart(spec, weights, settings, stops, apart_arguments(arguments), len(own))


def _apart(
    spec: RunSpec, weights: nn.Module, settings: DecodeSettings, stops: StopConditions | None, arguments: dict[str, Any],
    devices: int,
) -> StreamingDecoder:  # fmt: skip
    loop = Loop(spec.resources.longest_silence_s)
    engine: AsyncEngine | None = None
    try:
        engine = start_apart(loop, arguments, devices)
        hand_over = connect(engine, loop, weights, devices)
    except BaseException:
        if engine is not None:
            engine.shutdown()
        loop.close()
        raise
    interval = min(spec.overlap.chunk.size, MOST_TOGETHER)
    return StreamingDecoder(engine, loop, settings, hand_over, stops, interval, sleeps=spec.rollout.vllm_sleep)


def start_apart(loop: Loop, arguments: dict[str, Any], devices: int) -> AsyncEngine:
    """vLLM's engine in a process of its own, which will be sent weights.

    Args:
        arguments: see `apart_arguments`.
        devices: GPUs of its own; 0 where it shares ours.

    Raises:
        ImportError: vLLM is not installed.
        VllmError: it does not start.
    """
    prepare(APART if devices else APART | HANDLES)
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = WeightTransferConfig(backend="nccl" if devices else "ipc")

    async def start() -> AsyncEngine:
        started: AsyncEngine = AsyncLLM.from_engine_args(AsyncEngineArgs(weight_transfer_config=config, **arguments))
        return started

    return loop.run(start(), "starting", STARTED_WITHIN_S)


def reward_of(folder: Path, arguments: dict[str, Any], silence_s: float) -> PrefixReward:
    """The reward model in `folder`, in a process of its own.

    Args:
        arguments: see `reward_arguments`.
        silence_s: how long it may be silent, seconds.

    Raises:
        ImportError: vLLM is not installed.
        ModelFolderError: it is no model of one score a text.
        VllmError: it does not start.
    """
    check_classifier(folder)
    prepare(APART)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    loop = Loop(silence_s)

    async def start() -> PoolingEngine:
        started: PoolingEngine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        return started

    try:
        with reads_no_handles():
            engine = loop.run(start(), "starting the reward model", STARTED_WITHIN_S)
        return PrefixReward(engine, loop)
    except BaseException:
        loop.close()
        raise
