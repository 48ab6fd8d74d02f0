"""Arguments of vLLM's engines and requests, and the environment variables that it reads."""

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

# Set before vLLM is imported. Its V2 model runner draws by (seed, position), so a preempted or resubmitted request gets the same
# random numbers. Usage statistics are off.
BASE_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_NO_USAGE_STATS": "1"}
# The engine runs in this process.
IN_PROCESS_ENVIRONMENT = BASE_ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# The engine runs in other processes. They are spawned: threads and a GPU's driver state do not survive a fork.
SUBPROCESS_ENVIRONMENT = BASE_ENVIRONMENT | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
# CUDA IPC handles are sent as pickles; docs/models.md describes the risk.
IPC_ENVIRONMENT = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

# torchrun sets it: every process group uses the agent's store. vLLM's own groups have none and would wait for it.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def prepare(environment: dict[str, str]) -> None:
    """Set vLLM's environment variables, here and for the processes that it starts. Call after our own ranks' rendezvous."""
    os.environ.update(environment)
    os.environ.pop(AGENT_STORE, None)


@contextmanager
def without_ipc_handles() -> Iterator[None]:
    """Processes that start within it unpickle nothing, even if another engine reads IPC handles."""
    saved = {name: os.environ.pop(name) for name in IPC_ENVIRONMENT if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)


# Tokens per block of the prefix cache; only whole blocks are cached.
BLOCK_TOKENS = 16


def reward_arguments(folder: str, dtype: str, longest: int, slots: int, memory_share: float, place: int) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` for a pooling model that reads at most `slots` texts at once.

    Args:
        longest: tokens of a prompt and its answer.
        memory_share: share of the GPU's memory for weights and KV cache, 0 to 1.
        place: index of the GPU among those visible to this process.
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
        memory_share: share of the GPU's memory for weights and KV cache, 0 to 1.
        sleeps: whether it can release that memory between steps.
        places: indices of the GPUs among those visible to this process.
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
        # A cached prefix that outlives an update would be reused by other answers to the same prompt.
        "enable_prefix_caching": not settings.keeps_cache,
        "async_scheduling": False,  # a step returns its own tokens
        "generation_config": "vllm",  # not the folder's
        "disable_log_stats": True,
    }


def process_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same for `AsyncEngineArgs`, without `weight_transfer_config`; tensor parallel over the GPUs."""
    shared = {name: value for name, value in arguments.items() if name != "async_scheduling"}
    return shared | {"tensor_parallel_size": len(arguments["device_ids"]), "stream_interval": 1}


def sampling_arguments(settings: DecodeSettings, sequence: Sequence, ahead: int = 0) -> dict[str, Any]:
    """Arguments of `SamplingParams` for the remaining tokens of an answer; the decoder checks stop conditions itself.

    `ahead`: tokens received but not yet part of the answer.
    """
    arguments: dict[str, Any] = {
        "temperature": settings.temperature,
        "seed": request_seed(settings, sequence.sequence_id),
        "max_tokens": settings.max_new - sequence.length - ahead,
        "ignore_eos": True,
        "stop_token_ids": [settings.eos],
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
    }
    if settings.filters is not None:
        filters = {"top_k": settings.filters.top_k, "top_p": settings.filters.top_p, "min_p": settings.filters.min_p}
        arguments |= {name: value for name, value in filters.items() if value is not None}
    return arguments


def tokens_prompt(sequence: Sequence, ahead: Iterable[int] = ()) -> dict[str, list[int]]:
    """vLLM's `TokensPrompt`: prompt, answer so far, and tokens received ahead."""
    return {"prompt_token_ids": [*sequence.tokens().tolist(), *ahead]}


def request_seed(settings: DecodeSettings, sequence_id: int) -> int:
    """A request's seed, 63 bits, different for each sequence and use."""
    return int(generator(settings.seed, settings.use, sequence_id).integers(2**63))


def sampling_supports(completion: Completion) -> Support:
    """Sampling support of each new token, sorted ids; empty without filters."""
    if completion.sampling_mask is None:
        return []
    return [np.sort(np.asarray(ids, dtype=np.int32)) for ids in completion.sampling_mask.token_ids]
