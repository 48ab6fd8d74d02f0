"""Weight transfer to a vLLM on CPUs: packs are files in shared memory, which each of its workers reads.

vLLM has transfers for GPUs only (NCCL, CUDA IPC). This one implements the same two interfaces and registers them when it is
imported: here by the sender, in vLLM's workers as their extension class (`EXTENSION`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from oppo_core.models.shared_weights import shared_folder
from oppo_core.vllm.engine_args import FILE_BACKEND
from oppo_core.vllm.owner import shared_prefix

HEADER_BYTES = 1 << 20  # of a safetensors file, at most


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing: a file needs no connection."""


@dataclass
class FilePack(WeightTransferUpdateInfo):
    """Path of a safetensors file with some weights."""

    path: str


class FileReceiver(WeightTransferEngine[FileInit, FilePack]):
    """In a worker of vLLM: loads each pack into its model."""

    init_info_cls, update_info_cls = FileInit, FilePack

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """No-op."""

    def start_weight_update(self) -> None:
        """Prepare the model's layers for loading."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FilePack) -> None:
        """Load the weights of a pack."""
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self) -> None:
        """Process the loaded layers."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """No-op."""


@dataclass
class FileTrainerInit(TrainerInitInfo):
    """`pack_bytes`: a pack ends with the weight that reaches this size."""

    backend: ClassVar[str] = FILE_BACKEND
    pack_bytes: int = 0


class FileSender(TrainerWeightTransferEngine[FileTrainerInit]):
    """In the trainer's process: writes packs and lets the engine load them, one after the other."""

    init_info_cls = FileTrainerInit
    pack_bytes = 0

    @classmethod
    def trainer_init(cls, init_info: FileTrainerInit, *, client: Any, source: Any = None) -> Self:
        """Connect to the engine."""
        sender = cls(client=client, source=source)
        sender.pack_bytes = init_info.pack_bytes
        client.init_weight_transfer_engine({})
        return sender

    def send_weights(self) -> None:
        """Send all weights; returns when they are loaded."""
        self.client.start_weight_update()
        for pack in self._packs():
            folder = shared_folder(sum(tensor.nbytes for tensor in pack.values()) + HEADER_BYTES)
            with tempfile.NamedTemporaryFile(prefix=shared_prefix("weights"), dir=folder) as file:
                save_file(pack, file.name)
                self.client.update_weights({"path": file.name})
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """No-op."""

    def _packs(self) -> Iterator[dict[str, Tensor]]:
        pack: dict[str, Tensor] = {}
        for name, weight in self.source:
            pack[name] = weight.detach().clone().contiguous()  # tied weights share storage, which safetensors refuses
            if sum(tensor.nbytes for tensor in pack.values()) >= self.pack_bytes:
                yield pack
                pack = {}
        if pack:
            yield pack


class WorkerExtension:
    """Adds nothing to vLLM's worker: importing this module there registers the receiver."""


def _register() -> None:
    if FILE_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(FILE_BACKEND, FileReceiver)
        WeightTransferTrainerFactory.register_engine(FILE_BACKEND, FileSender)


_register()
