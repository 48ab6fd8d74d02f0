"""AdamW with gradient clipping and a scheduled learning rate, and its state as plain tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from oppo_core.distributed.process_group import ALONE, Ranks
from oppo_core.models.protocol import Network
from oppo_core.ppo.lr_schedule import Rates

MASTER = "master"
BETAS = (0.9, 0.95)
Outputs = TypeVar("Outputs", bound=tuple[Tensor, ...])


class NonFiniteError(RuntimeError):
    """A loss or a gradient is NaN or infinite: training stops before the weights are harmed."""


def not_finite(role: str, norm: float, step: int) -> NonFiniteError:
    """What to say of a gradient's norm in PPO step `step`, from 0."""
    return NonFiniteError(
        f"the {role}'s gradient norm is {norm} at step {step + 1}; lower its learning rate or look at the rewards"
    )


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that they hold together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _sum_precisely(of: weakref.ref[Parameter], parameter: Parameter) -> None:
    """Add a backward pass's gradient to its sum in float32 and let go of it: short ones exist one at a time.

    A sum in bfloat16 loses every gradient that is 256 times smaller than it. Nothing happens once the optimizer that has asked
    for it is gone: another one may train the same weights then.
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
    """AdamW over a network's weights. `masters`: the weights as precisely as they are kept, mostly the parameters themselves.

    Every rank adds up the gradients of all `ranks` and so takes the same step.
    """

    def __init__(
        self, parameters: Iterable[Parameter], rates: Rates, weight_decay: float, max_norm: float, ranks: Ranks = ALONE
    ) -> None:
        self.ranks = ranks
        self.parameters = [p for p in parameters if p.requires_grad]
        # A small step is lost on a bfloat16 weight, which has eight bits: those are kept in float32 here, and rounded for use.
        self.masters = [p if p.dtype.itemsize > 2 else Parameter(p.detach().float()) for p in self.parameters]
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(partial(_sum_precisely, weakref.ref(master)))  # type: ignore[no-untyped-call]
        self.rates = rates
        self.max_norm = max_norm
        # On a GPU one kernel takes the step; elsewhere a root of every second moment is made for it.
        fused = all(master.is_cuda for master in self.masters)
        self._adamw = torch.optim.AdamW(
            self.masters, lr=rates.peak, betas=BETAS, weight_decay=weight_decay, fused=fused or None, foreach=not fused
        )

    @property
    def saves_bytes(self) -> int:
        """About how much `state` holds: two moments of each weight, and weights that are kept apart."""
        apart = [m for p, m in zip(self.parameters, self.masters, strict=True) if m is not p]
        return 2 * size_of(self.masters) + size_of(apart)

    @property
    def holds_graphs(self) -> bool:
        """See `TrainingBackend.holds_graphs`."""
        return True

    def forward(self, compute: Callable[[Network], Outputs], network: Network) -> Outputs:
        """See `TrainingBackend.forward`: there is one network."""
        return compute(network)

    def begin(self, passes: int) -> None:
        """See `TrainingBackend.begin`: each rank makes as many passes as it has, and gradients are added up at the end."""
        self.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """See `TrainingBackend.backward`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def pad_passes(self) -> None:
        """See `TrainingBackend.pad_passes`: nobody waits."""

    def fault(self, reason: str) -> None:
        """See `TrainingBackend.fault`: the trainers agree on it among the ranks (`Ranks.agreed`)."""
        raise NonFiniteError(reason)

    def zero_grad(self) -> None:
        """Forget gradients."""
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None

    def apply(self, step: int, role: str) -> float:
        """Clip, step, and return the gradient's norm before clipping. Raises NonFiniteError when that is not finite."""
        norm = self.clip(step, role)
        self.take_step(step)
        return norm

    def clip(self, step: int, role: str) -> float:
        """Sum the gradients of all ranks and clip them; returns their norm before. Raises NonFiniteError as `apply` does."""
        self.ranks.add_up([master.grad for master in self.masters if master.grad is not None])
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.max_norm))
        if not norm < float("inf"):
            raise not_finite(role, norm, step)
        return norm

    def take_step(self, step: int) -> None:
        """Change weights and moments by the gradients that `clip` has left."""
        for group in self._adamw.param_groups:
            group["lr"] = self.rates.at(step)
        self._adamw.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
                    master.grad = None  # while activations are held there is no room for it

    def take_gradients(self) -> list[Tensor]:
        """What backward passes have added up since `begin`, a tensor a parameter; none is left here."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.zero_grad()
        return gradients

    def add_gradients(self, gradients: list[Tensor]) -> None:
        """Add gradients, a tensor a parameter, to those of the backward passes."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by weight number, and weights that are kept more precisely than they are used."""
        kept = {
            f"{number}.{MASTER}": master
            for number, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True))
            if master is not parameter
        }
        return kept | {
            f"{number}.{name}": torch.as_tensor(value)
            for number, entry in self._adamw.state_dict()["state"].items()
            for name, value in entry.items()
        }

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` gave."""
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            number, name = key.split(".", 1)
            if name == MASTER:
                self.masters[int(number)].data.copy_(value)
                continue
            state.setdefault(int(number), {})[name] = value
        self._adamw.load_state_dict({"state": state, "param_groups": self._adamw.state_dict()["param_groups"]})
