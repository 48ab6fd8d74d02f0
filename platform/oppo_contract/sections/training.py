"""Who takes the optimizer's steps, what of it each rank keeps, and what the passes before them keep."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from oppo_contract.sections.base import Section
from oppo_contract.spec_errors import SettingError


class Training(Section):
    """Who takes the optimizer's steps, what of it each rank keeps, and what the passes before them keep."""

    backend: Literal["plain", "deepspeed", "fsdp2"] = Field(
        "plain",
        description="Full optimizer on every rank (plain), or sharded over the ranks by DeepSpeed's ZeRO (`make deepspeed`) or"
        " torch FSDP2, which also shards the trained weights; each rank then keeps a full copy for decoding.",
    )
    zero_stage: Literal[1, 2, 3] = Field(
        2,
        description="What DeepSpeed shards: 1 optimizer state, 2 also gradients, 3 also the trained weights,"
        " where each rank keeps a full copy for decoding.",
    )
    offload: Literal["off", "optimizer"] = Field(
        "off",
        description="With deepspeed: keep the optimizer state and its step on the device, or in CPU memory.",
    )

    recompute: Literal["off", "head", "selective", "full"] = Field(
        "off",
        description="Activation checkpointing: what the backward pass recomputes: nothing (off); the logits, 512 tokens at a"
        " time (head); these and in each block all but matrix products and attention (selective); or everything"
        " (full).",
    )
    packing: Literal["off", "on"] = Field(
        "off",
        description="Sequence packing in the update: concatenate responses without padding (on), or pad them to the"
        " longest in the pass (off).",
    )

    @model_validator(mode="after")
    def means_something(self) -> Self:
        for path, given, default in (("zero_stage", self.zero_stage, 2), ("offload", self.offload, "off")):
            if self.backend != "deepspeed" and given != default:
                said = f"has no effect with training.backend {self.backend}"
                raise SettingError(path, said, value=given, allowed=f"{default}, or with backend deepspeed")
        return self

    @property
    def packs(self) -> bool:
        """Whether passes are packed."""
        return self.packing == "on"


PLAIN_TRAINING = Training()
