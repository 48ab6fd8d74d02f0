"""DeepSpeed's ZeRO as a `TrainingBackend`: the moments and master weights are sharded (stage 1), and the gradients too (2).

Every rank has the whole weights, and the other roles use them. Stage 3, which shards these too, is left to FSDP2.

DeepSpeed communicates in every backward pass, so all ranks make the same number of passes (`EqualizedPasses`).

Checkpoints use our format, because DeepSpeed's are pickles: full moments and master weights, one parameter at a time, under the
names of `Optimizer`. They depend on neither stage nor number of ranks, so any backend can resume them.

Not tested on a GPU yet: NCCL and offloading.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from oppo_contract.spec import Training
from oppo_core.distributed.process_group import Ranks
from oppo_core.models.protocol import Network
from oppo_core.training.lr_schedule import Rates
from oppo_core.training.optimizer import BETAS, MASTER, nonfinite_error
from oppo_core.training.process_group import join_default_group
from oppo_core.training.protocol import Outputs
from oppo_core.training.sharded_base import EqualizedPasses, PassThroughModule, is_low_precision, trainable_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET_NUMBERS = 2**24  # gradient elements in one all-reduce


class ZeroBackend(EqualizedPasses):
    """One role's network in a DeepSpeed engine."""

    def __init__(
        self, settings: Training, network: Network, rates: Rates, weight_decay: float, max_norm: float, ranks: Ranks
    ) -> None:
        super().__init__(network, ranks)
        self.rates = rates
        self.parameters = trainable_parameters(network)
        adamw = torch.optim.AdamW(self.parameters, lr=rates.peak, betas=BETAS, weight_decay=weight_decay)
        self._deepspeed = _load(self.parameters[0].device, ranks)
        config = _config(settings, max_norm, self.parameters[0].dtype)
        self._engine = self._deepspeed.initialize(
            model=PassThroughModule(network), optimizer=adamw, config=config, dist_init_required=False
        )[0]
        self._steps = 0  # optimizer steps taken

    @property
    def holds_graphs(self) -> bool:
        return True

    @property
    def saves_bytes(self) -> int:
        """Two float32 moments a parameter, and a float32 master copy of 16-bit weights."""
        return sum(p.numel() * (12 if is_low_precision(p) else 8) for p in self.parameters)

    def forward(self, compute: Callable[[Network], Outputs], network: Network) -> Outputs:
        """Passes without gradients do not go through DeepSpeed, so they contain no collectives."""
        if not torch.is_grad_enabled():
            return compute(self.network)
        with self.ranks.rank_errors("a forward pass"):
            return cast(Outputs, self._engine(compute))

    def reads(self, passes: int, shortest: Callable[[Network], Any]) -> AbstractContextManager[None]:
        """No-op: passes without gradients contain no collectives."""
        return nullcontext()

    def begin(self, passes: int) -> None:
        """Collective: the number of passes becomes the maximum over the ranks."""
        self.count(passes)
        self._engine.set_gradient_accumulation_boundary(self._due <= 1)

    def backward(self, loss: Tensor) -> None:
        """Scale by the world size: DeepSpeed averages over the ranks, and losses are divided by all ranks' tokens already."""
        with self.ranks.rank_errors("a backward pass"):
            self._engine.backward(loss * self.ranks.world)
        self._due -= 1
        self._engine.set_gradient_accumulation_boundary(self._due <= 1)

    def apply(self, step: int, role: str) -> float:
        self.raise_faults()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self.rates.at(step)
        with self.ranks.rank_errors("the optimizer's step"):
            self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not norm < float("inf"):
            raise nonfinite_error(role, norm, step)
        self._steps += 1
        return norm

    def state(self) -> dict[str, Tensor]:
        """Gathered one parameter at a time; only rank 0 keeps the result."""
        state: dict[str, Tensor] = {}
        for number, weight in enumerate(self.parameters):
            with self.ranks.rank_errors("gathering the optimizer's state"):
                gathered = {f"{number}.{name}": value for name, value in self._read(weight) if self.ranks.first}
            state |= {name: value.detach().reshape(weight.shape).to("cpu", copy=True) for name, value in gathered.items()}
            if self._steps and self.ranks.first:
                state[f"{number}.step"] = torch.tensor(float(self._steps))
        return state

    @property
    def shards(self) -> dict[str, Tensor]:
        """None: the state is gathered before it is written."""
        return {}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self._steps = int(tensors["0.step"]) if "0.step" in tensors else 0
        if self._steps:
            self._make_moments()
        for number, weight in enumerate(self.parameters):
            self._write(weight, tensors.get(f"{number}.{MASTER}", weight.detach()))
            for name in MOMENTS if self._steps else ():
                self._write(weight, tensors[f"{number}.{name}"], name)

    def _read(self, weight: Parameter) -> Iterator[tuple[str, Tensor]]:
        """Master weight and moments of one parameter, by name. Collective."""
        tools = self._deepspeed.utils
        if is_low_precision(weight):
            yield MASTER, tools.safe_get_full_fp32_param(weight)
        for name in MOMENTS if self._steps else ():
            yield name, tools.safe_get_full_optimizer_state(weight, name)

    def _write(self, weight: Parameter, value: Tensor, *name: str) -> None:
        """Write a parameter's master weight, or the named moment, into this rank's shard."""
        tools = self._deepspeed.utils
        write = tools.safe_set_full_optimizer_state if name else tools.safe_set_full_fp32_param
        write(weight, value.float().to(weight.device), *name)

    def _make_moments(self) -> None:
        """Create zero moments, which DeepSpeed creates in its first step only. Uses attributes that are not its public API."""
        zero = self._engine.optimizer
        plain = zero.optimizer
        flats = [flat for group in plain.param_groups for flat in group["params"]]
        for flat in flats:
            plain.state[flat] = {"step": torch.tensor(float(self._steps))} | {name: torch.zeros_like(flat) for name in MOMENTS}
        zero._lazy_init_hp_params_optimizer_state()


def _config(settings: Training, max_norm: float, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's configuration. The optimizer is torch's AdamW on every device, so that nothing is compiled."""
    zero: dict[str, Any] = {"stage": settings.zero_stage, "overlap_comm": False, "reduce_bucket_size": BUCKET_NUMBERS}
    if settings.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    # The number of passes and the token count are handled in `begin` and `backward`, not by DeepSpeed.
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": max_norm,
        "steps_per_print": 10**9, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }  # fmt: skip
    if dtype == torch.bfloat16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return config


def _load(device: torch.device, ranks: Ranks) -> Any:
    """Import DeepSpeed and join the default process group, which both engines of a process share."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device.type == "cuda" else "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # torchrun sets it; other launchers may not
    # DeepSpeed uses names that torch deprecates; the warning would appear in every process.
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
    import deepspeed
    import deepspeed.utils

    deepspeed.utils.logger.setLevel(logging.ERROR)
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes over a minute
    backend = join_default_group(device, ranks)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=backend)
    return deepspeed
