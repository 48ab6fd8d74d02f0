"""Sequences as vLLM's requests, and its outputs as tokens of sequences."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from oppo_core.rng import generator
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.sequence import Sequence, Support
from oppo_core.vllm.protocols import Completion

# Before vLLM is imported. Its second model runner draws by (seed, position): what interrupts a request, a preemption or an end of
# ours, changes none of its random numbers. And it reports its use to nobody.
ALWAYS = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_NO_USAGE_STATS": "1"}
# Our process holds its engine.
ENVIRONMENT = ALWAYS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Others do. They are not forked: threads and the driver of a GPU do not survive that.
APART = ALWAYS | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
# Handles of our GPU's memory go to the other process as pickles; docs/models.md says who could send some.
HANDLES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


# torchrun's promise that its store is there for every group. vLLM makes groups of its own, where none is, and would wait for it.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def prepare(environment: dict[str, str]) -> None:
    """Set what vLLM reads, here and in the processes that it starts. Our own ranks have met by now."""
    os.environ.update(environment)
    os.environ.pop(AGENT_STORE, None)


@contextmanager
def reads_no_handles() -> Iterator[None]:
    """Processes that are started within it unpickle nothing, whatever ours must for the one that reads handles."""
    held = {name: os.environ.pop(name) for name in HANDLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


# What is cached, and found again, is whole blocks of so many tokens.
BLOCK_TOKENS = 16


def reward_arguments(folder: str, dtype: str, longest: int, slots: int, memory_share: float, place: int) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` for a pooling model that reads at most `slots` texts at once.

    Args:
        longest: tokens of a prompt and its answer.
        memory_share: the part of the GPU's memory that weights, keys and values may take, 0 to 1.
        place: the GPU, by its number among those that this process sees.
    """
    return {
        "model": folder,
        "runner": "pooling",
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": longest,
        "max_num_seqs": slots,
        "gpu_memory_utilization": memory_share,
        "device_ids": [place],
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }


def engine_arguments(
    folder: str, dtype: str, settings: DecodeSettings, slots: int, memory_share: float, sleeps: bool, places: list[int]
) -> dict[str, Any]:
    """Arguments of `EngineArgs` for the model in `folder` with at most `slots` requests at once.

    Args:
        memory_share: the part of the GPU's memory that weights, keys and values may take, 0 to 1.
        sleeps: whether it can give that memory back for a while.
        places: the GPUs, by their numbers among those that this process sees.
    """
    return {
        "model": folder,
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": settings.seed % 2**32,
        "max_model_len": settings.max_prompt + settings.max_new,
        "max_num_seqs": slots,
        "gpu_memory_utilization": memory_share,
        "enable_sleep_mode": sleeps,
        "device_ids": places,
        "logprobs_mode": "processed_logprobs",
        "return_sampling_mask": settings.filters is not None,
        # A cached prefix that outlives an update would be read by other answers to the same prompt.
        "enable_prefix_caching": not settings.keeps_cache,
        "async_scheduling": False,  # a step returns its own tokens
        "generation_config": "vllm",  # not the folder's
        "disable_log_stats": True,
    }


def apart_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same for `AsyncEngineArgs`, but for `weight_transfer_config`: each layer is divided among the GPUs."""
    kept = {name: value for name, value in arguments.items() if name != "async_scheduling"}
    return kept | {"tensor_parallel_size": len(arguments["device_ids"]), "stream_interval": 1}


def sampling_arguments(settings: DecodeSettings, sequence: Sequence, waiting: int = 0) -> dict[str, Any]:
    """Arguments of `SamplingParams` for the rest of an answer; its ends are ours to see, but for the length limit.

    `waiting`: tokens that it has besides, before their turn.
    """
    arguments: dict[str, Any] = {
        "temperature": settings.temperature,
        "seed": seed_of(settings, sequence.sequence_id),
        "max_tokens": settings.max_new - sequence.length - waiting,
        "ignore_eos": True,
        "stop_token_ids": [settings.eos],
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
    }
    if settings.filters is not None:
        given = {"top_k": settings.filters.top_k, "top_p": settings.filters.top_p, "min_p": settings.filters.min_p}
        arguments |= {name: value for name, value in given.items() if value is not None}
    return arguments


def prompt_of(sequence: Sequence, waiting: Iterable[int] = ()) -> dict[str, list[int]]:
    """vLLM's `TokensPrompt`: prompt and answer so far, with tokens that come before their turn."""
    return {"prompt_token_ids": [*sequence.tokens().tolist(), *waiting]}


def seed_of(settings: DecodeSettings, sequence_id: int) -> int:
    """A request's seed, 63 bits, another one for each sequence and use."""
    return int(generator(settings.seed, settings.use, sequence_id).integers(2**63))


def supports_of(completion: Completion) -> Support:
    """What each new token was sampled among, as sorted ids; empty where nothing is filtered."""
    if completion.sampling_mask is None:
        return []
    return [np.sort(np.asarray(ids, dtype=np.int32)) for ids in completion.sampling_mask.token_ids]
