"""DeepSpeed's ZeRO as a `Stepper`: each rank keeps a part of the optimizer, and at stage 3 of the weights that are trained.

DeepSpeed meets the other ranks in every backward pass. So all make equally many: a rank that has fewer repeats one of its own
with a loss of zero. And none may stop on its own account: a loss that is not finite is remembered, and all end before the step.

Checkpoints are ours, not DeepSpeed's, which are pickles: the moments and precise weights of one parameter after the other, whole,
by the names that `Optimizer` gives them. They know neither stage nor number of ranks, so each backend resumes what another wrote.

Not yet tried on a GPU: NCCL, and offloading from one.
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
from oppo_core.ppo.lr_schedule import Rates
from oppo_core.ppo.optimizer import BETAS, MASTER, not_finite
from oppo_core.training.backends import Outputs
from oppo_core.training.process_group import join_default_group
from oppo_core.training.sharded_base import EvenPasses, Through, is_short, trained_in

MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET_NUMBERS = 2**24  # gradients that are added up together


class ZeroStepper(EvenPasses):
    """One role's network in a DeepSpeed engine.

    At stages 1 and 2 the network that the other roles see is trained itself. At stage 3 a copy is, of which each rank keeps a
    part; after each step it is gathered, a parameter at a time, into the whole network.
    """

    def __init__(
        self, settings: Training, network: Network, rates: Rates, weight_decay: float, max_norm: float, ranks: Ranks
    ) -> None:
        super().__init__(network, ranks)
        self.rates, self._stage = rates, settings.zero_stage
        self.parameters = trained_in(network)
        within = copy.deepcopy(network) if self._stage == 3 else network
        self._parts = trained_in(within)
        adamw = torch.optim.AdamW(self._parts, lr=rates.peak, betas=BETAS, weight_decay=weight_decay)
        self._deepspeed = _load(self.parameters[0].device, ranks)
        config = _config(settings, max_norm, self.parameters[0].dtype)
        with _linear_is(nn.functional.linear):
            self._engine = self._deepspeed.initialize(
                model=Through(within), optimizer=adamw, config=config, dist_init_required=False
            )[0]
            self._linear = nn.functional.linear
        self._steps = 0  # taken

    @property
    def holds_graphs(self) -> bool:
        """See `Stepper.holds_graphs`: at stage 3 the weights of a held graph would be let go of, and its gradients wrong."""
        return self._stage < 3

    @property
    def saves_bytes(self) -> int:
        """See `Stepper.saves_bytes`: two moments in float32, and short weights precisely."""
        return sum(p.numel() * (12 if is_short(p) else 8) for p in self.parameters)

    def forward(self, compute: Callable[[Network], Outputs], network: Network) -> Outputs:
        """See `Stepper.forward`. Without gradients nobody is met: the whole network does."""
        if not torch.is_grad_enabled():
            return compute(self._whole)
        self._latest = compute
        with _linear_is(self._linear), self.ranks.reaching("a forward pass"):
            return cast(Outputs, self._engine(compute))

    def begin(self, passes: int) -> None:
        """See `Stepper.begin`. Takes the most that a rank has."""
        self.count(passes)
        self._engine.set_gradient_accumulation_boundary(self._due <= 1)

    def backward(self, loss: Tensor) -> None:
        """See `Stepper.backward`. DeepSpeed takes the ranks' mean, and losses are divided by the tokens of all ranks already."""
        with self.ranks.reaching("a backward pass"):
            self._engine.backward(loss * self.ranks.world)
        self._due -= 1
        self._engine.set_gradient_accumulation_boundary(self._due <= 1)

    def apply(self, step: int, role: str) -> float:
        """See `Stepper.apply`."""
        self.refuse_faults()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self.rates.at(step)
        with self.ranks.reaching("the optimizer's step"):
            self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not norm < float("inf"):
            raise not_finite(role, norm, step)
        self._steps += 1
        with self.ranks.reaching("gathering the weights"):
            self._hand_over()
        return norm

    def state(self) -> dict[str, Tensor]:
        """See `Stepper.state`: gathered one parameter at a time, and kept by the first rank."""
        kept: dict[str, Tensor] = {}
        for number, (whole, part) in enumerate(zip(self.parameters, self._parts, strict=True)):
            with self.ranks.reaching("gathering the optimizer's state"):
                found = {f"{number}.{name}": value for name, value in self._read(whole, part) if self.ranks.first}
            kept |= {name: value.detach().reshape(whole.shape).to("cpu", copy=True) for name, value in found.items()}
            if self._steps and self.ranks.first:
                kept[f"{number}.step"] = torch.tensor(float(self._steps))
        return kept

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """See `Stepper.load_state`."""
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
        """What is kept of one parameter, by name. All ranks take part."""
        tools = self._deepspeed.utils
        if is_short(whole):
            yield MASTER, tools.safe_get_full_fp32_param(part)
        for name in MOMENTS if self._steps else ():
            yield name, tools.safe_get_full_optimizer_state(part, name)

    def _write(self, part: Parameter, value: Tensor, *name: str) -> None:
        """Put a parameter's precise weight, or the moment of that name, where DeepSpeed keeps this rank's part of it."""
        tools = self._deepspeed.utils
        value = value.float().to(part.device)
        if self._stage < 3:
            (tools.safe_set_full_optimizer_state if name else tools.safe_set_full_fp32_param)(part, value, *name)
            return
        # Not by the `full` names: they fail where the ranks' parts are longer than the parameter.
        size = part.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = nn.functional.pad(value.flatten(), (0, size * self.ranks.world - value.numel()))
        own = padded[self.ranks.rank * size : (self.ranks.rank + 1) * size]
        (tools.safe_set_local_optimizer_state if name else tools.safe_set_local_fp32_param)(part, own, *name)

    @torch.no_grad()
    def _hand_over(self) -> None:
        """The weights that are trained into the network that the other roles see."""
        if self._stage < 3:
            return
        for whole, part in zip(self.parameters, self._parts, strict=True):
            with self._gathered(part):
                whole.copy_(part)

    @contextmanager
    def _gathered(self, part: Parameter, changed: bool = False) -> Iterator[None]:
        """Within it the parameter is whole; `changed`: it is written to, by all ranks alike, and cut up again."""
        gather = self._deepspeed.zero.GatheredParameters
        with gather([part], modifier_rank=0 if changed else None, enabled=self._stage == 3), torch.no_grad():
            yield

    def _make_moments(self) -> None:
        """Zero moments: DeepSpeed makes them in its first step only. Reaches for names that it does not promise to keep."""
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
def _linear_is(chosen: Callable[..., Tensor]) -> Iterator[None]:
    """Within it linear layers are computed by that function, afterwards by torch's again.

    At stage 3 DeepSpeed has one of its own, which does not hold on to gathered weights, and puts it in the place of torch's, for
    the whole process. It rounds otherwise, and so would the decoder and the other networks.
    """
    plain = nn.functional.linear
    nn.functional.linear = chosen
    try:
        yield
    finally:
        nn.functional.linear = plain


def _config(settings: Training, max_norm: float, dtype: torch.dtype) -> dict[str, Any]:
    """What DeepSpeed is told. Steps are torch's own AdamW on every device, so that nothing is compiled."""
    zero: dict[str, Any] = {"stage": settings.zero_stage, "overlap_comm": False, "reduce_bucket_size": BUCKET_NUMBERS}
    if settings.zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    if settings.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    # The ranks' numbers of passes and the total of tokens are ours (`begin`, `backward`), so it counts nothing itself.
    told: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": max_norm,
        "steps_per_print": 10**9, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }  # fmt: skip
    if dtype == torch.bfloat16:
        told |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return told


def _load(device: torch.device, ranks: Ranks) -> Any:
    """DeepSpeed, with the process's one default group, in which it meets the other ranks. Two engines of a process share it."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device.type == "cuda" else "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # torchrun sets it; who starts a rank otherwise need not
    # It uses names that torch will give up, and torch says so in every process.
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
    import deepspeed
    import deepspeed.utils

    deepspeed.utils.logger.setLevel(logging.ERROR)
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for over a minute
    backend = join_default_group(device, ranks)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=backend)
    return deepspeed
