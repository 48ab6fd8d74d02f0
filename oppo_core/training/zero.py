"""DeepSpeed's ZeRO as a `TrainingBackend`: the optimizer state is sharded, and at stage 3 the trainable weights too.

DeepSpeed communicates in every backward pass, so all ranks make the same number of passes (`EqualizedPasses`).

Checkpoints use our format, because DeepSpeed's are pickles: full moments and master weights, one parameter at a time, under the
names of `Optimizer`. They depend on neither stage nor number of ranks, so any backend can resume them.

Not tested on a GPU yet: NCCL and offloading.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
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
    """One role's network in a DeepSpeed engine.

    Stages 1 and 2 train the network that the other roles use. Stage 3 trains a sharded copy, which is gathered after each step,
    one parameter at a time, into the full network.
    """

    def __init__(
        self, settings: Training, network: Network, rates: Rates, weight_decay: float, max_norm: float, ranks: Ranks
    ) -> None:
        super().__init__(network, ranks)
        self.rates, self._stage = rates, settings.zero_stage
        self.parameters = trainable_parameters(network)
        within = copy.deepcopy(network) if self._stage == 3 else network
        self._parts = trainable_parameters(within)
        adamw = torch.optim.AdamW(self._parts, lr=rates.peak, betas=BETAS, weight_decay=weight_decay)
        self._deepspeed = _load(self.parameters[0].device, ranks)
        config = _config(settings, max_norm, self.parameters[0].dtype)
        with _using_linear(nn.functional.linear):
            self._engine = self._deepspeed.initialize(
                model=PassThroughModule(within), optimizer=adamw, config=config, dist_init_required=False
            )[0]
            self._linear = nn.functional.linear
        self._steps = 0  # optimizer steps taken

    @property
    def holds_graphs(self) -> bool:
        """False at stage 3, which frees the weights that a retained graph needs: its gradients would be wrong."""
        return self._stage < 3

    @property
    def saves_bytes(self) -> int:
        """Two float32 moments a parameter, and a float32 master copy of 16-bit weights."""
        return sum(p.numel() * (12 if is_low_precision(p) else 8) for p in self.parameters)

    def forward(self, compute: Callable[[Network], Outputs], network: Network) -> Outputs:
        """Without gradients the full network is used, so no collective runs."""
        if not torch.is_grad_enabled():
            return compute(self._whole)
        with _using_linear(self._linear), self.ranks.rank_errors("a forward pass"):
            return cast(Outputs, self._engine(compute))

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
        with self.ranks.rank_errors("gathering the weights"):
            self._update_full_network()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Gathered one parameter at a time; only rank 0 keeps the result."""
        state: dict[str, Tensor] = {}
        for number, (whole, part) in enumerate(zip(self.parameters, self._parts, strict=True)):
            with self.ranks.rank_errors("gathering the optimizer's state"):
                gathered = {f"{number}.{name}": value for name, value in self._read(whole, part) if self.ranks.first}
            state |= {name: value.detach().reshape(whole.shape).to("cpu", copy=True) for name, value in gathered.items()}
            if self._steps and self.ranks.first:
                state[f"{number}.step"] = torch.tensor(float(self._steps))
        return state

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self._steps = int(tensors["0.step"]) if "0.step" in tensors else 0
        if self._steps:
            self._make_moments()
        for number, (whole, part) in enumerate(zip(self.parameters, self._parts, strict=True)):
            self._write(part, tensors.get(f"{number}.{MASTER}", whole.detach()))
            for name in MOMENTS if self._steps else ():
                self._write(part, tensors[f"{number}.{name}"], name)
            with self._gathered(part, changed=True):
                part.data.copy_(whole.data)

    def _read(self, whole: Parameter, part: Parameter) -> Iterator[tuple[str, Tensor]]:
        """Master weight and moments of one parameter, by name. Collective."""
        tools = self._deepspeed.utils
        if is_low_precision(whole):
            yield MASTER, tools.safe_get_full_fp32_param(part)
        for name in MOMENTS if self._steps else ():
            yield name, tools.safe_get_full_optimizer_state(part, name)

    def _write(self, part: Parameter, value: Tensor, *name: str) -> None:
        """Write a parameter's master weight, or the named moment, into this rank's shard."""
        tools = self._deepspeed.utils
        value = value.float().to(part.device)
        if self._stage < 3:
            (tools.safe_set_full_optimizer_state if name else tools.safe_set_full_fp32_param)(part, value, *name)
            return
        # `safe_set_full_*` fails where the padded shards are longer than the parameter.
        size = part.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = nn.functional.pad(value.flatten(), (0, size * self.ranks.world - value.numel()))
        own = padded[self.ranks.rank * size : (self.ranks.rank + 1) * size]
        (tools.safe_set_local_optimizer_state if name else tools.safe_set_local_fp32_param)(part, own, *name)

    @torch.no_grad()
    def _update_full_network(self) -> None:
        """Copy the trained weights into the network that the other roles use."""
        if self._stage < 3:
            return
        for whole, part in zip(self.parameters, self._parts, strict=True):
            with self._gathered(part):
                whole.copy_(part)

    @contextmanager
    def _gathered(self, part: Parameter, changed: bool = False) -> Iterator[None]:
        """Gather a parameter for the block; with `changed` the block writes it on every rank, and it is sharded again."""
        gather = self._deepspeed.zero.GatheredParameters
        with gather([part], modifier_rank=0 if changed else None, enabled=self._stage == 3), torch.no_grad():
            yield

    def _make_moments(self) -> None:
        """Create zero moments, which DeepSpeed creates in its first step only. Uses attributes that are not its public API."""
        zero = self._engine.optimizer
        plain = zero.optimizer
        flats = (
            zero.fp32_partitioned_groups_flat
            if self._stage == 3
            else [flat for group in plain.param_groups for flat in group["params"]]
        )
        for flat in flats:
            plain.state[flat] = {"step": torch.tensor(float(self._steps))} | {name: torch.zeros_like(flat) for name in MOMENTS}
        if self._stage < 3:
            zero._lazy_init_hp_params_optimizer_state()


@contextmanager
def _using_linear(chosen: Callable[..., Tensor]) -> Iterator[None]:
    """Use `chosen` as `torch.nn.functional.linear` within the block.

    ZeRO-3 replaces torch's function for the whole process by one that does not keep gathered weights. It rounds differently, so
    outside DeepSpeed's own passes torch's function is put back: the decoder and the other networks must not change.
    """
    plain = nn.functional.linear
    nn.functional.linear = chosen
    try:
        yield
    finally:
        nn.functional.linear = plain


def _config(settings: Training, max_norm: float, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's configuration. The optimizer is torch's AdamW on every device, so that nothing is compiled."""
    zero: dict[str, Any] = {"stage": settings.zero_stage, "overlap_comm": False, "reduce_bucket_size": BUCKET_NUMBERS}
    if settings.zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
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
