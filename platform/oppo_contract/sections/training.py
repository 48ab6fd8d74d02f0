"""Who takes the optimizer's steps, what of it each rank keeps, and what the passes before them keep."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from oppo_contract.sections.base import Section
from oppo_contract.spec_errors import Impossible


class Training(Section):
    """Who takes the optimizer's steps, what of it each rank keeps, and what the passes before them keep."""

    backend: Literal["plain", "deepspeed", "fsdp2"] = Field(
        "plain",
        description="Every rank keeps the whole optimizer, or it is cut up among them: by DeepSpeed's ZeRO (`make deepspeed`), or"
        " by torch's own FSDP2, the weights that are trained too, of which each rank then keeps a whole copy to decode with.",
    )
    zero_stage: Literal[1, 2, 3] = Field(
        2,
        description="What deepspeed cuts up: 1 moments and precise weights, 2 gradients too, 3 the weights that are trained too,"
        " of which each rank then keeps a whole copy to decode with.",
    )
    offload: Literal["off", "optimizer"] = Field(
        "off",
        description="With deepspeed: where the optimizer's state lies and steps are taken: on the device, or in main memory.",
    )

    recompute: Literal["off", "head", "selective", "full"] = Field(
        "off",
        description="What an update does not keep for its backward pass but computes again: nothing; the logits, of which those"
        " of 512 tokens live at a time (head); these, and of each block all but matrix products and attention (selective), or all"
        " (full).",
    )
    packing: Literal["off", "on"] = Field(
        "off",
        description="Lay the answers of an update's pass behind each other, without padding (on), or side by side, padded to the"
        " longest of them (off).",
    )

    @model_validator(mode="after")
    def means_something(self) -> Self:
        for path, given, default in (("zero_stage", self.zero_stage, 2), ("offload", self.offload, "off")):
            if self.backend != "deepspeed" and given != default:
                said = f"means nothing to training.backend {self.backend}"
                raise Impossible(path, said, value=given, allowed=f"{default}, or with backend deepspeed")
        return self

    @property
    def packs(self) -> bool:
        """Whether passes are packed."""
        return self.packing == "on"


PLAIN_TRAINING = Training()
