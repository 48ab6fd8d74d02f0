"""The trainer's weights into a vLLM that lives in another process, through its weight-transfer API.

To GPUs of its own they are broadcast by NCCL, in a group made for this alone. On our own GPU handles of the memory are handed
over (CUDA IPC), which vLLM opens, so nothing is copied by way of the host. Either way they go in packs (`pack_bytes`), one
weight after the other: adapters are merged one layer at a time, and what a backend cuts up among ranks it has gathered after
its step.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oppo_core.models.adapters import plain_layout, plain_weights
from oppo_core.vllm.asyncio_thread import Loop
from oppo_core.vllm.errors import VllmError
from oppo_core.vllm.protocols import AsyncEngine, WeightTrainer
from oppo_estimate.memory import PACK_BYTES, pack_bytes

HOST = "127.0.0.1"


class HandOver(Protocol):
    """How an engine gets the trainer's weights."""

    def send(self, version: int) -> None:
        """Hand over the present weights, which are labelled so. The engine is paused. Raises VllmError when it fails."""

    def close(self) -> None:
        """Let go of what connects the two."""


@dataclass(frozen=True, slots=True)
class Meta:
    """`vllm.distributed.weight_transfer.base.ParamMeta`: a weight that will come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source:
    """`WeightSource` of the same module: a network's weights by the names of its folder, in the same order each time."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def metadata(self) -> list[Meta]:
        """What iterating will give, at no cost."""
        return [Meta(name, weight.dtype, tuple(weight.shape)) for name, weight in plain_layout(self._network).items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for (name, weight), meta in zip(plain_weights(self._network), self.metadata(), strict=True):
            yield name, weight.to(meta.dtype)


def largest_weight(source: Source) -> int:
    """Bytes of the largest weight that will come."""
    return max(math.prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata())


class Client:
    """`VLLMWeightSyncClient` of the same module: what the sending side asks the engine, from whichever thread it likes.

    `version` labels the next weights: the sender finishes without a label of its own. `abandon` is called when the engine cannot
    take weights that are being sent, because the sender would wait for it on the GPU, where nobody could tell it.
    """

    def __init__(
        self, engine: AsyncEngine, loop: Loop, init_request: Callable[..., Any], update_request: Callable[..., Any]
    ) -> None:
        """`init_request`, `update_request`: vLLM's classes of these names, or what stands in for them."""
        self.version: int | None = None
        self.abandon: Callable[[], None] = lambda: None
        self._engine, self._loop = engine, loop
        self._init_request, self._update_request = init_request, update_request

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the engine meet the trainer."""
        request = self._init_request(init_info=init_info)
        self._loop.run(self._engine.init_weight_transfer_engine(request), "meeting the trainer")

    def start_weight_update(self) -> None:
        """Weights come now."""
        self._loop.run(self._engine.start_weight_update(), "beginning to take weights")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let the engine take those that are described. Returns when it has them."""
        try:
            self._loop.run(self._engine.update_weights(self._update_request(update_info=update_info)), "taking weights")
        except VllmError:
            self.abandon()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All have come; the version is ours unless another one is given."""
        label = weight_version if weight_version is not None else str(self.version)
        self._loop.run(self._engine.finish_weight_update(weight_version=label), "taking the last weights")


class Transfer:
    """A `HandOver` by vLLM's own sending side."""

    def __init__(self, trainer: WeightTrainer, client: Client) -> None:
        self._trainer, self._client = trainer, client
        client.abandon = trainer.shutdown

    def send(self, version: int) -> None:
        self._client.version = version
        if torch.cuda.is_available():
            # The sender reads on streams of its own, which do not wait for what the update has queued.
            torch.cuda.current_stream().synchronize()
        with _named():
            self._trainer.send_weights()

    def close(self) -> None:
        self._trainer.shutdown()


@contextmanager
def _named() -> Iterator[None]:
    """Whatever goes wrong within, of vLLM's and NCCL's own kinds, is a VllmError."""
    try:
        yield
    except VllmError:
        raise
    except Exception as error:
        raise VllmError(f"handing over weights failed: {type(error).__name__}: {error}") from error


def connect(engine: AsyncEngine, loop: Loop, network: nn.Module, devices: int) -> Transfer:
    """Meet the engine, which was started for it: by NCCL on `devices` GPUs of its own, by CUDA IPC where that is 0.

    Raises:
        ImportError: vLLM is not installed.
        VllmError: they do not meet.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    client = Client(engine, loop, WeightTransferInitRequest, WeightTransferUpdateRequest)
    source = Source(network)
    given = trainer_arguments(devices, largest_weight(source))
    info = NCCLTrainerInitInfo(**given) if devices else IPCTrainerInitInfo(**given)
    with _named():
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    return Transfer(trainer, client)


def trainer_arguments(devices: int, largest: int) -> dict[str, Any]:
    """Arguments of `NCCLTrainerInitInfo`, or of `IPCTrainerInitInfo` without devices. Each rank is its own engine's sender.

    `largest`: bytes of the largest weight, such as a vocabulary's embedding.
    """
    buffer = PACK_BYTES if devices else pack_bytes(largest, devices)
    arguments: dict[str, Any] = {"packed": True, "packed_buffer_size_bytes": buffer, "rank": 0}
    if devices:
        arguments |= {"master_address": HOST, "master_port": _free_port(), "world_size": 1 + devices}
    return arguments


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])
