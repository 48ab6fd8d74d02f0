"""AdamW with gradient clipping, learning-rate schedule, float32 master weights and data-parallel gradient all-reduce."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from oppo_core.distributed.process_group import SINGLE, Ranks
from oppo_core.models.protocol import Network
from oppo_core.training.lr_schedule import Rates

MASTER = "master"
BETAS = (0.9, 0.95)
Outputs = TypeVar("Outputs", bound=tuple[Tensor, ...])


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; raised before the weights change."""


def nonfinite_error(role: str, norm: float, step: int) -> NonFiniteError:
    """Error for a non-finite gradient norm in PPO step `step` (from 0)."""
    return NonFiniteError(
        f"the {role}'s gradient norm is {norm} at step {step + 1}; lower its learning rate or look at the rewards"
    )


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Total size of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _sum_precisely(of: weakref.ref[Parameter], parameter: Parameter) -> None:
    """Gradient hook: add a backward pass's gradient to the float32 master gradient and free the bfloat16 one.

    A bfloat16 sum loses every addend 256 times smaller than it. No-op once the optimizer that owns the master weight is deleted,
    because another one may train the same weights then.
    """
    master = of()
    if master is None:
        return
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


class Optimizer:
    """AdamW over a network's trainable weights. `masters`: float32 copies of 16-bit weights, else the parameters themselves.

    Gradients are all-reduced over `ranks`, so every rank takes the same step.
    """

    def __init__(
        self, parameters: Iterable[Parameter], rates: Rates, weight_decay: float, max_norm: float, ranks: Ranks = SINGLE
    ) -> None:
        self.ranks = ranks
        self.parameters = [p for p in parameters if p.requires_grad]
        # A bfloat16 weight has an 8-bit significand and would lose small steps, so a float32 master copy is updated and rounded.
        self.masters = [p if p.dtype.itemsize > 2 else Parameter(p.detach().float()) for p in self.parameters]
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(partial(_sum_precisely, weakref.ref(master)))  # type: ignore[no-untyped-call]
        self.rates = rates
        self.max_norm = max_norm
        # The fused kernel on a GPU; elsewhere `foreach`, which allocates the square root of every second moment.
        fused = all(master.is_cuda for master in self.masters)
        self._adamw = torch.optim.AdamW(
            self.masters, lr=rates.peak, betas=BETAS, weight_decay=weight_decay, fused=fused or None, foreach=not fused
        )

    @property
    def saves_bytes(self) -> int:
        """Approximate size of `state`: two moments per weight, and float32 master copies."""
        copies = [m for p, m in zip(self.parameters, self.masters, strict=True) if m is not p]
        return 2 * tensor_bytes(self.masters) + tensor_bytes(copies)

    @property
    def holds_graphs(self) -> bool:
        return True

    def forward(self, compute: Callable[[Network], Outputs], network: Network) -> Outputs:
        return compute(network)

    def reads(self, passes: int, shortest: Callable[[Network], Any]) -> AbstractContextManager[None]:
        """No-op: passes contain no collectives."""
        return nullcontext()

    def begin(self, passes: int) -> None:
        """Zero the gradients; ranks may run different numbers of passes."""
        self.zero_grad()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def pad_passes(self, compute: Callable[[Network], Outputs]) -> None:
        """No-op: passes contain no collectives."""

    def fault(self, reason: str) -> None:
        """Raise NonFiniteError; the trainers agree on it among the ranks (`Ranks.raise_on_all`)."""
        raise NonFiniteError(reason)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None

    def apply(self, step: int, role: str) -> float:
        """Clip, step, and return the gradient norm before clipping. Raises NonFiniteError if it is not finite."""
        norm = self.clip(step, role)
        self.take_step(step)
        return norm

    def clip(self, step: int, role: str) -> float:
        """All-reduce and clip gradients; returns the norm before clipping. Raises NonFiniteError if it is not finite."""
        if self.ranks.world > 1:
            for master in self.masters:  # of a rank without rows of this mini-batch
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
            self.ranks.all_reduce([master.grad for master in self.masters if master.grad is not None])
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.max_norm))
        if not norm < float("inf"):
            raise nonfinite_error(role, norm, step)
        return norm

    def take_step(self, step: int) -> None:
        """Update weights and moments with the clipped gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = self.rates.at(step)
        self._adamw.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
                    master.grad = None  # free memory for activations

    def take_gradients(self) -> list[Tensor]:
        """Return the gradients accumulated since `begin`, one tensor per parameter, and zero them."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.zero_grad()
        return gradients

    def add_gradients(self, gradients: list[Tensor]) -> None:
        """Add gradients, one tensor per parameter, to those of the backward passes."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by parameter index, and float32 master copies."""
        masters = {
            f"{number}.{MASTER}": master
            for number, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True))
            if master is not parameter
        }
        return masters | {
            f"{number}.{name}": torch.as_tensor(value)
            for number, entry in self._adamw.state_dict()["state"].items()
            for name, value in entry.items()
        }

    @property
    def shards(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            number, name = key.split(".", 1)
            if name == MASTER:
                self.masters[int(number)].data.copy_(value)
                continue
            state.setdefault(int(number), {})[name] = value
        self._adamw.load_state_dict({"state": state, "param_groups": self._adamw.state_dict()["param_groups"]})
