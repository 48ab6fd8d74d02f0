"""How both models are trained here: Muon for the matrices inside the blocks, AdamW for the rest, one cycle of the rate.

With AdamW alone the model learned moods (what the first word announces) on some seeds only; with Muon on all, in half the steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oppo_core.models.tiny_transformer import TinyTransformer

WARMUP_SHARE = 0.05


class OneCycle:
    """Both optimizers of a model; their rates rise briefly, then fall to zero over `steps` steps."""

    def __init__(self, model: TinyTransformer, muon_rate: float, adamw_rate: float, steps: int) -> None:
        self.model = model
        matrices = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
        others = [p for name, p in model.named_parameters() if not (name.startswith("blocks.") and p.dim() == 2)]
        self.optimizers = (
            torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.0),
            torch.optim.AdamW(others, lr=adamw_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
        )
        warm = max(1, int(WARMUP_SHARE * steps))
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(one, lambda step: min((step + 1) / warm, max(0.0, 1 - step / steps)))
            for one in self.optimizers
        ]

    def step(self, loss: Tensor) -> None:
        """Backward, clip, update."""
        self.model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
