"""Transfer of the trainer's weights to vLLM in another process, through its weight-transfer API.

To separate GPUs weights are broadcast by NCCL in a process group of their own. On a shared GPU vLLM opens CUDA IPC handles, so
nothing is copied through the host. Both send packs (`pack_bytes`), one weight after another; sharded weights were gathered after
the optimizer step. On a CPU packs are files (oppo_core/vllm/file_transfer.py). LoRA adapters are sent as adapters, see
oppo_core/models/adapters.py.
"""

from __future__ import annotations

import math
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oppo_core.models.adapters import has_lora, save_adapter, saved_module
from oppo_core.models.shared_weights import shared_folder
from oppo_core.vllm.asyncio_thread import AsyncioThread
from oppo_core.vllm.errors import VllmError
from oppo_core.vllm.owner import shared_prefix
from oppo_core.vllm.protocols import AsyncEngine, WeightTrainer
from oppo_estimate.memory import PACK_BYTES, pack_bytes

HOST = "127.0.0.1"


class WeightTransfer(Protocol):
    """Sends the trainer's weights to an engine.

    `lora_request`: vLLM's `LoRARequest` for every request, if adapters are sent; otherwise None.
    """

    lora_request: Any

    def send(self, version: int) -> None:
        """Send the current weights, labelled `version`, to the paused engine. Raises VllmError on failure."""

    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True, slots=True)
class WeightMeta:
    """`vllm.distributed.weight_transfer.base.ParamMeta`: name, dtype and shape of a weight."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """`WeightSource` of the same module: a network's weights by their names in its model folder, always in the same order."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def metadata(self) -> list[WeightMeta]:
        """Names, dtypes and shapes in iteration order, without computing weights."""
        return [WeightMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from saved_module(self._network).state_dict().items()


def largest_weight(source: WeightSource) -> int:
    """Size of the largest weight in bytes."""
    return max(math.prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata())


class WeightSyncClient:
    """`VLLMWeightSyncClient` of the same module: the sender's calls to the engine. Thread-safe.

    `version`: label of the next weights, since the sender gives none. `abandon`: called when the engine fails during a transfer;
    otherwise the sender would wait on the GPU without end.
    """

    def __init__(
        self, engine: AsyncEngine, loop: AsyncioThread, init_request: Callable[..., Any], update_request: Callable[..., Any]
    ) -> None:
        """`init_request`, `update_request`: vLLM's request classes."""
        self.version: int | None = None
        self.abandon: Callable[[], None] = lambda: None
        self._engine, self._loop = engine, loop
        self._init_request, self._update_request = init_request, update_request

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect the engine to the trainer."""
        request = self._init_request(init_info=init_info)
        self._loop.run(self._engine.init_weight_transfer_engine(request), "connecting to the trainer")

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._loop.run(self._engine.start_weight_update(), "beginning a weight update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let the engine load the described weights. Returns when it has them."""
        try:
            self._loop.run(self._engine.update_weights(self._update_request(update_info=update_info)), "loading weights")
        except VllmError:
            self.abandon()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update; `weight_version`: default: `version`."""
        label = weight_version if weight_version is not None else str(self.version)
        self._loop.run(self._engine.finish_weight_update(weight_version=label), "finishing a weight update")


class VllmWeightTransfer:
    """A `WeightTransfer` that uses vLLM's own sender."""

    lora_request = None

    def __init__(self, trainer: WeightTrainer, client: WeightSyncClient) -> None:
        self._trainer, self._client = trainer, client
        client.abandon = trainer.shutdown

    def send(self, version: int) -> None:
        self._client.version = version
        if torch.cuda.is_available():
            # The sender's CUDA streams do not wait for kernels that the update has queued.
            torch.cuda.current_stream().synchronize()
        with as_vllm_error():
            self._trainer.send_weights()

    def close(self) -> None:
        self._trainer.shutdown()


class AdapterTransfer:
    """A `WeightTransfer` of LoRA adapters: a folder in shared memory, from which vLLM replaces the previous adapters."""

    def __init__(self, engine: AsyncEngine, loop: AsyncioThread, network: nn.Module, lora_request: Callable[..., Any]) -> None:
        """`lora_request`: vLLM's class."""
        self._engine, self._loop, self._network = engine, loop, network
        size = sum(weight.nbytes for weight in network.parameters() if weight.requires_grad)
        self._folder = tempfile.TemporaryDirectory(prefix=shared_prefix("adapter"), dir=shared_folder(2 * size))
        self.lora_request = lora_request("actor", 1, self._folder.name)
        self._replacement = lora_request("actor", 1, self._folder.name, load_inplace=True)

    def send(self, version: int) -> None:
        with as_vllm_error():
            save_adapter(self._network, Path(self._folder.name))
        self._loop.run(self._engine.add_lora(self._replacement), "loading adapters")
        self._loop.run(self._engine.update_weight_version(str(version)), "labelling adapters")

    def close(self) -> None:
        self._folder.cleanup()


@contextmanager
def as_vllm_error() -> Iterator[None]:
    """Errors of vLLM and NCCL become VllmErrors."""
    try:
        yield
    except VllmError:
        raise
    except Exception as error:
        raise VllmError(f"the weight transfer failed: {type(error).__name__}: {error}") from error


def connect(engine: AsyncEngine, loop: AsyncioThread, network: nn.Module, devices: int, on_gpu: bool = True) -> WeightTransfer:
    """Connect to an engine that `start_engine_process` started: by NCCL with `devices` GPUs of its own, by CUDA IPC if 0.

    Adapters need no connection.

    Args:
        on_gpu: whether the engine runs on a GPU; if not, packs of weights are files.

    Raises:
        ImportError: vLLM is not installed.
        VllmError: the connection fails.
    """
    if has_lora(network):
        from vllm.lora.request import LoRARequest

        return AdapterTransfer(engine, loop, network, LoRARequest)
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    client = WeightSyncClient(engine, loop, WeightTransferInitRequest, WeightTransferUpdateRequest)
    source = WeightSource(network)
    info = _gpu_init_info(source, devices) if on_gpu else _file_init_info()
    with as_vllm_error():
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    return VllmWeightTransfer(trainer, client)


def _gpu_init_info(source: WeightSource, devices: int) -> Any:
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    arguments = trainer_arguments(devices, largest_weight(source))
    return NCCLTrainerInitInfo(**arguments) if devices else IPCTrainerInitInfo(**arguments)


def _file_init_info() -> Any:
    from oppo_core.vllm.file_transfer import FileTrainerInit

    return FileTrainerInit(rank=0, pack_bytes=PACK_BYTES)


def trainer_arguments(devices: int, largest: int) -> dict[str, Any]:
    """Arguments of `NCCLTrainerInitInfo`, or of `IPCTrainerInitInfo` without devices. Each rank sends to its own engine.

    `largest`: bytes of the largest weight, such as a vocabulary's embedding.
    """
    buffer = PACK_BYTES if devices else pack_bytes(largest, devices)
    arguments: dict[str, Any] = {"packed": True, "packed_buffer_size_bytes": buffer, "rank": 0}
    if devices:
        arguments |= {"master_address": HOST, "master_port": _free_port(), "world_size": 1 + devices}
    return arguments


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
