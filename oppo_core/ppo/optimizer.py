"""AdamW with gradient clipping and a linear warm-up, and its state as plain tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter


class NonFiniteError(RuntimeError):
    """A loss or a gradient is NaN or infinite: training stops before the weights are harmed."""


class Optimizer:
    """AdamW over a network's weights. `learning_rate` is reached after `warmup_steps` PPO steps."""

    def __init__(
        self, parameters: Iterable[Parameter], learning_rate: float, weight_decay: float, warmup_steps: int, max_norm: float
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.max_norm = max_norm
        self._adamw = torch.optim.AdamW(
            self.parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, foreach=True
        )

    def rate(self, step: int) -> float:
        """Learning rate of PPO step `step`, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup_steps))

    def zero_grad(self) -> None:
        """Forget gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def apply(self, step: int, role: str) -> float:
        """Clip, step, and return the gradient's norm before clipping. Raises NonFiniteError when that is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm))
        if not norm < float("inf"):
            raise NonFiniteError(
                f"the {role}'s gradient norm is {norm} at step {step + 1}; lower its learning rate or look at the rewards"
            )
        for group in self._adamw.param_groups:
            group["lr"] = self.rate(step)
        self._adamw.step()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by weight number."""
        return {
            f"{number}.{name}": torch.as_tensor(value)
            for number, entry in self._adamw.state_dict()["state"].items()
            for name, value in entry.items()
        }

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` gave."""
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            number, name = key.split(".", 1)
            state.setdefault(int(number), {})[name] = value
        self._adamw.load_state_dict({"state": state, "param_groups": self._adamw.state_dict()["param_groups"]})
