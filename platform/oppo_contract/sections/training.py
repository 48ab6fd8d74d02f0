"""Spec section of training: backend, optimizer sharding, offload, activation checkpointing, sequence packing."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from oppo_contract.sections.base import Section


class Training(Section):
    """Training backend, sharding and memory options."""

    backend: Literal["plain", "deepspeed", "fsdp2"] = Field(
        "plain",
        description="Whole models and optimizer on every rank (plain); optimizer sharded over the ranks by DeepSpeed's ZeRO"
        " (`make deepspeed`); or all models sharded by torch's FSDP2 (fsdp2), where each rank keeps one whole copy of the actor,"
        " which decodes, and only services and vLLM are streamed to.",
    )
    zero_stage: Literal[1, 2] = Field(2, description="What DeepSpeed shards: 1 optimizer state, 2 also gradients.")
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

    retained_passes: int = Field(
        1,
        ge=0,
        le=10_000,
        description="With one optimizer step per batch: passes of `ppo.micro_batch_tokens` each whose activations are kept from"
        " the computation of log-probs and values until their update. Passes beyond it are computed twice.",
    )

    @model_validator(mode="after")
    def check_unused_settings(self) -> Self:
        if self.backend != "deepspeed":
            for name in ("zero_stage", "offload"):
                self.reject_unused(name, f"with training.backend {self.backend}", "backend deepspeed")
        return self

    @property
    def shards_weights(self) -> bool:
        """Whether the weights of all roles are sharded over the ranks."""
        return self.backend == "fsdp2"

    @property
    def packs(self) -> bool:
        """Whether responses are packed."""
        return self.packing == "on"


PLAIN_TRAINING = Training()
