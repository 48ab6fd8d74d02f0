"""Optimizers of both models: Muon for matrices in the blocks, AdamW for the rest, one learning-rate cycle.

With AdamW alone the model learned moods on some seeds only; with Muon on all, in half the steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oppo_core.models.tiny_transformer import TinyTransformer

WARMUP_SHARE = 0.05


class OneCycle:
    """Both optimizers of a model; learning rates warm up, then decay linearly to zero over `steps` steps."""

    def __init__(self, model: TinyTransformer, muon_rate: float, adamw_rate: float, steps: int) -> None:
        self.model = model
        matrices = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
        others = [p for name, p in model.named_parameters() if not (name.startswith("blocks.") and p.dim() == 2)]
        self.optimizers = (
            torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.0),
            torch.optim.AdamW(others, lr=adamw_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
        )
        warmup = max(1, int(WARMUP_SHARE * steps))
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warmup, max(0.0, 1 - step / steps)))
            for optimizer in self.optimizers
        ]

    def step(self, loss: Tensor) -> None:
        """Backward, clip, update."""
        self.model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
