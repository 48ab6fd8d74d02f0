"""How the actor answers, and what runs at the same time."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from oppo_contract.sections.base import Section
from oppo_contract.spec_errors import Impossible


class Rollout(Section):
    """How the actor answers."""

    max_new_tokens: int = Field(512, ge=1, le=131072, description="Longest response, tokens, its end-of-sequence token included.")
    max_prompt_tokens: int = Field(
        256, ge=1, le=131072, description="Longest prompt, tokens; a longer one is refused before the run starts."
    )
    temperature: float = Field(1.0, gt=0, le=10, description="Divides the logits, in sampling and in training.")
    top_k: int | None = Field(
        None,
        ge=1,
        description="Sample among the k likeliest tokens only; off when empty. The choice is recorded and applied in training.",
    )
    top_p: float | None = Field(None, gt=0, lt=1, description="Sample among the likeliest tokens of this mass; off when empty.")
    min_p: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Sample among tokens at least this likely, as a share of the likeliest one; off when empty.",
    )
    stop_tokens: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list, max_length=32, description="Token ids that end an answer, beside the end-of-sequence token."
    )
    stop_texts: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(
        default_factory=list, max_length=8, description="Texts that end an answer as soon as they appear in it, as its last part."
    )

    backend: Literal["torch", "vllm"] = Field(
        "torch", description="What decodes: our own decoder, or vLLM (a GPU, and `pip install '.[gpu]'`)."
    )
    vllm_process: Literal["engine", "own"] = Field(
        "engine",
        description="With vllm: it lives in the engine's process, and a batch ends at the very token; or in one of its own, which"
        " decodes on while tokens are taken and scored, until the batch is complete: what it has written beyond that belongs to"
        " the next step.",
    )
    vllm_memory_share: float = Field(
        0.35,
        gt=0,
        lt=1,
        description="With vllm: the part of the GPU's memory for its own weights, keys and values.",
    )

    vllm_sleep: bool = Field(
        False, description="With vllm: it gives that memory back for each update, and is handed the weights anew after it."
    )

    @model_validator(mode="after")
    def vllm_decodes(self) -> Self:
        if self.backend == "torch":
            for name in ("vllm_process", "vllm_memory_share", "vllm_sleep"):
                self.refuse_idle(name, "to rollout.backend torch", "backend vllm")
        elif self.filters and self.top_k is None:
            raise Impossible("top_k", "vLLM tells what it left to sample among with top-k only", value=None, allowed="a number")
        return self

    @property
    def filters(self) -> bool:
        """Whether some tokens are excluded from sampling."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None


class Overcommit(Section):
    """Δ, the extra sequences in flight, and the controller that moves it."""

    controller: Literal["fixed", "slope"] = Field(
        "slope", description="Keep Δ at `initial`, or follow the slope of the reward (`inter_step: defer` only)."
    )
    initial: int = Field(4, ge=0, description="Δ at the first step, sequences.")
    min: int = Field(0, ge=0, description="Lower bound of Δ, sequences.")
    max: int = Field(8, ge=0, description="Upper bound of Δ, sequences; at most the batch size.")
    window: int = Field(10, ge=2, le=1000, description="Steps over which the reward's slope is taken.")
    rule: Literal["additive", "proportional"] = Field(
        "additive", description="Change by `step`, or by a quarter of Δ (at least one)."
    )
    step: int = Field(1, ge=1, description="Size of an additive change, sequences.")

    @model_validator(mode="after")
    def ordered(self) -> Self:
        if not self.min <= self.initial <= self.max:
            field = "initial" if self.min <= self.max else "min"
            raise Impossible(
                field,
                f"min {self.min} ≤ initial {self.initial} ≤ max {self.max} does not hold",
                value=getattr(self, field),
                allowed=f"{self.min} to {self.max}" if field == "initial" else f"at most max, {self.max}",
            )
        return self


class Chunk(Section):
    """C, the tokens decoded between two hand-overs, and the controller that tunes it."""

    controller: Literal["fixed", "tuner"] = Field(
        "fixed", description="Keep C at `size`, or try candidates and keep the fastest."
    )
    size: int = Field(32, ge=1, le=65536, description="C at the first step, tokens.")
    candidates: list[Annotated[int, Field(ge=1)]] | None = Field(
        None, min_length=2, max_length=5, description="Sizes to try; default: powers of two around the current one."
    )
    explore_every: int = Field(50, ge=1, description="Steps between two explorations.")


class Overlap(Section):
    """What runs at the same time. Everything off is plain sequential PPO."""

    intra_step: Literal["off", "per_sequence", "per_chunk"] = Field(
        "per_chunk",
        description="When the scorers read: `off` after the batch is complete, `per_sequence` each answer as it finishes,"
        " `per_chunk` each chunk while the actor writes the next. Changes no result.",
    )
    inter_step: Literal["off", "defer", "tail_batch"] = Field(
        "defer",
        description="What becomes of the longest answers: `off` waits for them; `defer` carries them into the next step, which"
        " trains stale tokens; `tail_batch` puts their prompts off and trains them together in a later, strictly on-policy step.",
    )
    overcommit: Overcommit = Field(default_factory=Overcommit, description="Δ, the extra sequences in flight.")
    max_age: int = Field(2, ge=1, le=1000, description="Steps for which an answer may be deferred before the batch waits for it.")
    chunk: Chunk = Field(default_factory=Chunk, description="C, the tokens between two hand-overs.")
    kv_after_update: Literal["recompute", "keep"] = Field(
        "recompute",
        description="What becomes of a deferred answer's cached keys and values when the actor's weights change."
        " With `keep` all its tokens are stale.",
    )
    update_overlap: bool = Field(
        False, description="Start the update of finished answers while the tail decodes. Exact; needs one optimizer step a batch."
    )

    @model_validator(mode="after")
    def a_cache_is_kept_of_deferred_answers(self) -> Self:
        if self.inter_step != "defer":
            self.refuse_idle("kv_after_update", f"with inter_step {self.inter_step}, which defers no answer", "inter_step defer")
        return self
