"""Spec sections of the rollout (sampling, stop conditions, vLLM) and of the overlap of stages (Δ, chunks, deferral)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from oppo_contract.sections.base import Section
from oppo_contract.spec_errors import SettingError


class Rollout(Section):
    """Sampling of responses."""

    max_new_tokens: int = Field(
        512, ge=1, le=131072, description="Max response length including the end-of-sequence token, tokens."
    )
    max_prompt_tokens: int = Field(
        256, ge=1, le=131072, description="Max prompt length, tokens; longer prompts are rejected before the run starts."
    )
    temperature: float = Field(1.0, gt=0, le=10, description="Sampling temperature; divides the logits in sampling and training.")
    top_k: int | None = Field(
        None,
        ge=1,
        description="Sample from the k most likely tokens; off when empty. The mask is recorded and applied in training.",
    )
    top_p: float | None = Field(
        None, gt=0, lt=1, description="Nucleus sampling: the most likely tokens with this total probability; off when empty."
    )
    min_p: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Sample from tokens with at least this share of the highest probability; off when empty.",
    )
    stop_tokens: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list, max_length=32, description="Stop token ids, in addition to the end-of-sequence token."
    )
    stop_texts: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(
        default_factory=list,
        max_length=8,
        description="Stop strings; the response ends with the first one that appears and includes it.",
    )

    backend: Literal["torch", "vllm"] = Field(
        "torch",
        description="Rollout engine: the built-in decoder, or vLLM (`pip install '.[gpu]'`) in a separate process, which keeps"
        " decoding while tokens are scored: tokens beyond the end of the batch belong to the next step.",
    )
    vllm_memory_share: float = Field(
        0.35,
        gt=0,
        lt=1,
        description="With vllm on a GPU: fraction of its memory for vLLM's weights and KV cache.",
    )

    vllm_sleep: bool = Field(
        False,
        description="With vllm on a GPU: release that memory during each update and load the weights again afterwards.",
    )

    @model_validator(mode="after")
    def check_vllm_settings(self) -> Self:
        if self.backend == "torch":
            for name in ("vllm_memory_share", "vllm_sleep"):
                self.reject_unused(name, "with rollout.backend torch", "backend vllm")
        elif self.has_sampling_mask and self.top_k is None:
            raise SettingError("top_k", "vLLM reports its sampling mask only with top-k", value=None, allowed="a number")
        return self

    @property
    def has_sampling_mask(self) -> bool:
        """Whether some tokens are excluded from sampling."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None


class Overcommit(Section):
    """Δ, the extra rollouts in flight, and its controller."""

    controller: Literal["fixed", "slope"] = Field(
        "slope", description="Keep Δ at `initial`, or adapt it to the slope of the reward (`inter_step: defer` only)."
    )
    initial: int = Field(4, ge=0, description="Initial Δ, rollouts. Not given: 4, at least `min` and at most `max`.")
    min: int = Field(0, ge=0, description="Minimum Δ, rollouts.")
    max: int = Field(8, ge=0, description="Maximum Δ, rollouts; at most the batch size. Not given: 8, at least `min`.")
    window: int = Field(10, ge=2, le=1000, description="Window for the slope of the reward, steps.")
    rule: Literal["additive", "proportional"] = Field(
        "additive", description="Change by `step`, or by a quarter of Δ (at least one)."
    )
    step: int = Field(1, ge=1, description="Size of an additive change, rollouts.")

    @model_validator(mode="after")
    def check_bounds(self) -> Self:
        if not self.min <= self.initial <= self.max:
            field = "initial" if self.min <= self.max else "min"
            raise SettingError(
                field,
                f"min {self.min} ≤ initial {self.initial} ≤ max {self.max} does not hold",
                value=getattr(self, field),
                allowed=f"{self.min} to {self.max}" if field == "initial" else f"at most max, {self.max}",
            )
        return self


class Chunk(Section):
    """C, the tokens decoded per chunk, and its controller."""

    controller: Literal["fixed", "tuner"] = Field(
        "fixed", description="Keep C at `size`, or try candidates and keep the fastest."
    )
    size: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="Initial C, tokens. Empty: the largest power of two up to a quarter of `max_new_tokens`, from 8 to 32.",
    )
    candidates: list[Annotated[int, Field(ge=1)]] | None = Field(
        None, min_length=2, max_length=5, description="Candidate sizes, tokens; default: powers of two around the current size."
    )
    explore_every: int = Field(
        50, ge=1, description="Steps before the first exploration, and the minimum between two; trials take at most 2 % of steps."
    )


class Overlap(Section):
    """Overlap of stages. All off is sequential PPO."""

    intra_step: Literal["off", "per_sequence", "per_chunk"] = Field(
        "per_chunk",
        description="When scorers run: `off` after the batch is complete, `per_sequence` when each response finishes,"
        " `per_chunk` on each chunk while the actor decodes the next. Does not change results.",
    )
    inter_step: Literal["off", "defer", "tail_batch"] = Field(
        "defer",
        description="Handling of the longest responses: `off` waits for them; `defer` carries them into the next step, which"
        " trains stale tokens; `tail_batch` postpones their prompts to a later, strictly on-policy step.",
    )
    overcommit: Overcommit = Field(default_factory=Overcommit, description="Δ: extra rollouts in flight.")
    max_age: int = Field(
        2, ge=1, le=1000, description="Max staleness: steps a response may be deferred before the batch waits for it."
    )
    chunk: Chunk = Field(default_factory=Chunk, description="C: tokens decoded per chunk.")
    kv_after_update: Literal["recompute", "keep"] = Field(
        "recompute",
        description="Handling of a deferred response's KV cache after an update of the actor's weights."
        " With `keep` all its tokens are stale.",
    )
    update_overlap: bool = Field(
        False,
        description="Start the update of finished responses while the tail decodes. Exact; needs one optimizer step per batch.",
    )

    @model_validator(mode="after")
    def check_kv_after_update(self) -> Self:
        if self.inter_step != "defer":
            self.reject_unused(
                "kv_after_update", f"with inter_step {self.inter_step}, which defers no responses", "inter_step defer"
            )
        return self
