"""Arguments of vLLM's engines and requests, and the environment variables that it reads."""

from __future__ import annotations

import getpass
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oppo_contract.sections.models import VLLM_MAX_RANK
from oppo_core.rng import generator
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.sequence import Sequence, Support
from oppo_core.vllm.errors import VllmError
from oppo_core.vllm.owner import OWNER, SOCKETS
from oppo_core.vllm.protocols import Completion

# Set before vLLM is imported. Its processes are spawned: threads and a GPU's driver state do not survive a fork. Usage statistics
# are off.
BASE_ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}
# The V2 model runner draws by (seed, position), so a preempted or resubmitted request gets the same random numbers.
GPU_ENVIRONMENT = BASE_ENVIRONMENT | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
# The V2 model runner needs Triton, which has no CPU backend. Without multiprocessing vLLM's engine process runs the model itself;
# otherwise it starts another one for that.
CPU_ENVIRONMENT = BASE_ENVIRONMENT | {
    "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
# CUDA IPC handles are sent as pickles; docs/models.md describes the risk.
IPC_ENVIRONMENT = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

# torchrun sets it: every process group uses the agent's store. vLLM's own groups have none and would wait for it.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
COMPILED = "TORCHINDUCTOR_CACHE_DIR"

_STARTING = threading.Lock()


@contextmanager
def vllm_environment(placement: Placement, resources: ExitStack, handles: bool = False) -> Iterator[None]:
    """Environment of vLLM's processes, which start within it. Call after our own ranks' rendezvous.

    vLLM sets further variables (threads, preloaded libraries), which must not reach processes of ours: afterwards all are as
    before, except those of `placement` and `handles`, which vLLM reads later too. One engine starts at a time.

    Args:
        resources: removes the folder of the engine's sockets and files, which vLLM leaves behind, when it is closed.
        handles: whether the processes exchange CUDA IPC handles; others must not unpickle anything.
    """
    sockets = resources.enter_context(tempfile.TemporaryDirectory(prefix="oppo-vllm-", ignore_cleanup_errors=True))
    wanted = placement.environment | {SOCKETS: sockets} | (IPC_ENVIRONMENT if handles else {})
    # On a CPU its workers meet by a temporary file, which stays where they are killed. What it compiles is kept.
    compiled = os.environ.get(COMPILED) or str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
    temporary = {} if placement.gpus else {"TMPDIR": sockets, COMPILED: compiled}
    with _STARTING:
        before = dict(os.environ)
        for name in (AGENT_STORE, *IPC_ENVIRONMENT):
            os.environ.pop(name, None)
        os.environ.update(wanted | temporary | {OWNER: str(os.getpid())})
        try:
            yield
        finally:
            for name in os.environ.keys() - before.keys() - wanted.keys():
                del os.environ[name]
            os.environ.update(before | wanted)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an engine of vLLM runs: on GPUs, by their indices among those visible to this process, or on the CPU without any.

    `memory_share`: of a GPU's memory for weights and KV cache, 0 to 1. On a CPU, `cache_bytes`: size of the KV cache; `workers`:
    processes with a part of each layer (tensor parallel), for tests.
    """

    gpus: tuple[int, ...] = ()
    memory_share: float = 0.0
    cache_bytes: int = 0
    workers: int = 1

    @property
    def environment(self) -> dict[str, str]:
        """Variables that vLLM reads."""
        return GPU_ENVIRONMENT if self.gpus else CPU_ENVIRONMENT

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the KV cache; only whole blocks are reused. vLLM's attention on a CPU wants multiples of 32."""
        return 16 if self.gpus else 32

    def arguments(self) -> dict[str, Any]:
        """Arguments of `AsyncEngineArgs`; tensor parallel over the GPUs. On a CPU nothing is compiled, which takes a minute."""
        if self.gpus:
            share = {"gpu_memory_utilization": self.memory_share, "device_ids": list(self.gpus)}
            return share | {"tensor_parallel_size": len(self.gpus)}
        return {"kv_cache_memory_bytes": self.cache_bytes, "enforce_eager": True, "tensor_parallel_size": self.workers}


def cpu_cache_bytes(slots: int, longest: int, bytes_per_token: int) -> int:
    """KV cache of `slots` sequences of at most `longest` tokens, in whole blocks; one more is vLLM's own."""
    block = Placement().block_tokens
    return (slots * -(-longest // block) + 1) * block * bytes_per_token


# The transfer of oppo_core/vllm/file_transfer.py, and the class of it that vLLM's workers import.
FILE_BACKEND = "oppo_files"
EXTENSION = "oppo_core.vllm.file_transfer.WorkerExtension"

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, VLLM_MAX_RANK)  # `vllm.config.lora.MaxLoRARanks`


def reward_arguments(folder: str, dtype: str, longest: int, slots: int, placement: Placement) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` for a pooling model that reads at most `slots` texts at once.

    `longest`: tokens of a prompt and its answer.
    """
    return placement.arguments() | {
        "model": folder,
        "runner": "pooling",
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": longest,
        "max_num_seqs": slots,
        "block_size": placement.block_tokens,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }


def engine_arguments(
    folder: str, dtype: str, settings: DecodeSettings, slots: int, sleeps: bool, placement: Placement
) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`, without `weight_transfer_config`, for the model in `folder` with at most `slots` requests.

    `sleeps`: whether it can release its memory between steps, on a GPU.
    """
    on_gpu = bool(placement.gpus)
    return (
        placement.arguments()
        | {
            "model": folder,
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "seed": settings.seed % 2**32,
            "max_model_len": settings.max_prompt + settings.max_new,
            "max_num_seqs": slots,
            "enable_sleep_mode": sleeps,
            "logprobs_mode": "processed_logprobs",
            "return_sampling_mask": settings.filters is not None and on_gpu,
            # A cached prefix that outlives an update would be reused by other answers to the same prompt.
            "enable_prefix_caching": not settings.keeps_cache,
            "generation_config": "vllm",  # not the folder's
            "disable_log_stats": True,
            "stream_interval": 1,
        }
        | ({} if on_gpu else {"worker_extension_cls": EXTENSION})
    )


def lora_arguments(rank: int) -> dict[str, Any]:
    """Further arguments of `AsyncEngineArgs` for one set of LoRA adapters; vLLM allows certain ranks only."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(allowed for allowed in LORA_RANKS if allowed >= rank)}


def sampling_arguments(
    settings: DecodeSettings, sequence: Sequence, ahead: int = 0, draws_by_position: bool = True
) -> dict[str, Any]:
    """Arguments of `SamplingParams` for the remaining tokens of an answer; the decoder checks stop conditions itself.

    Args:
        ahead: tokens received but not yet part of the answer.
        draws_by_position: whether the model runner draws by (seed, position); the V1 runner, the only one on CPUs, draws a
            request's random numbers in order, so the rest of an answer needs another seed than its beginning.
    """
    first = 0 if draws_by_position else sequence.length + ahead
    arguments: dict[str, Any] = {
        "temperature": settings.temperature,
        "seed": (request_seed(settings, sequence.sequence_id) + first) % 2**63,
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


def sampling_supports(completion: Completion, filtered: bool) -> Support:
    """Sampling support of each new token, sorted ids; empty unless `filtered`. Raises VllmError without the mask then."""
    if not filtered or not completion.token_ids:
        return []
    if completion.sampling_mask is None:
        raise VllmError("vLLM reports no sampling mask, so the trainer cannot apply top-k, top-p or min-p; turn them off")
    return [np.sort(np.asarray(ids, dtype=np.int32)) for ids in completion.sampling_mask.token_ids]
