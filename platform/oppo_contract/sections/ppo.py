"""Spec section of the PPO step: loss, advantages, rewards, optimizers, KL penalty, PPO-ptx."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from oppo_contract.sections.base import Path, Positive, Section, Share, is_stored
from oppo_contract.spec_errors import SettingError

# Settings of the critic, and of per-token rewards and discounts, which only a critic uses.
CRITIC_SETTINGS = (
    "critic_learning_rate", "critic_warmup_steps", "critic_schedule", "value_warmup_steps", "value_clip_range", "gamma",
    "gae_lambda", "whiten_rewards",
)  # fmt: skip
# The default of earlier versions, which their saved specs have without a critic too; the first of CRITIC_SETTINGS.
FORMER_CRITIC_RATE = 1e-5
Schedule = Literal["constant", "linear", "cosine"]


class Kl(Section):
    """KL penalty to the reference policy."""

    coefficient: float = Field(0.05, ge=0, le=100, description="Weight of the KL term; the start value when adaptive.")
    estimator: Literal["k1", "k2", "k3", "k3+"] = Field(
        "k1",
        description="Per-token estimator: k1 log-ratio, k2 half its square, k3 unbiased, with low variance near the"
        " reference, k3+ value of k3 with the gradient of k2. k1 only in the reward, k3+ only in the loss.",
    )
    placement: Literal["reward", "loss"] = Field(
        "reward", description="Subtract it from the per-token reward, or add it to the policy loss."
    )
    controller: Literal["fixed", "adaptive"] = Field(
        "fixed", description="Fixed coefficient, or adapted towards the KL `target`."
    )
    target: Positive = Field(0.1, description="Target mean KL per token of the adaptive controller, nats.")
    horizon: int = Field(10_000, ge=1, description="Horizon of the adaptive controller, sequences.")

    @model_validator(mode="after")
    def check_estimator(self, info: ValidationInfo) -> Self:
        if self.placement == "loss" and self.estimator == "k1" and not is_stored(info):
            reason = "has an expected gradient of zero in the loss, so it would not limit the KL (docs/algorithm.md)"
            raise SettingError("estimator", reason, value="k1", allowed="k2, k3 or k3+, or placement reward")
        if self.placement == "reward" and self.estimator == "k3+":
            raise SettingError("estimator", "differs from k3 only in the loss", value="k3+", allowed="k1, k2 or k3")
        return self

    @model_validator(mode="after")
    def check_unused_settings(self) -> Self:
        if self.controller == "fixed":
            for name in ("target", "horizon"):
                self.reject_unused(name, "while the coefficient is fixed", "controller adaptive")
        if self.coefficient == 0:
            self.reject_unused("controller", "with a coefficient of 0, which it multiplies", "a coefficient above 0")
        return self


class Pretraining(Section):
    """Pretraining loss in the actor's update (PPO-ptx, arXiv 2203.02155 §3.5)."""

    data: Path = Field(description="Id from a worker's catalogue or a local JSON Lines file of texts.")
    field: str = Field("text", min_length=1, max_length=120, description="Key of the text in each line.")
    coefficient: Positive = Field(1.0, le=1000, description="Weight of the mean next-token loss.")
    sequences: int = Field(8, ge=1, le=65536, description="Texts per PPO step, a multiple of the mini-batches.")
    max_tokens: int = Field(256, ge=2, le=131072, description="Max text length, tokens; longer texts are truncated.")


class Ppo(Section):
    """The PPO step."""

    algorithm: Literal["ppo", "grpo", "rloo"] = Field(
        "ppo", description="Advantages from a critic (GAE), or without a critic from the other responses of the same group."
    )
    group_size: int = Field(
        1,
        ge=1,
        le=256,
        description="G: responses per prompt. GRPO and RLOO need 2 or more; B, Δ and staleness then count groups.",
    )
    batch_size: int = Field(16, ge=1, le=65536, description="B: prompts per step; rollouts per step = B × `group_size`.")
    epochs: int = Field(1, ge=1, le=64, description="Epochs over the batch per step.")
    mini_batches: int = Field(
        1,
        ge=1,
        le=1024,
        description="Mini-batches (optimizer steps) per epoch; must divide the batch size. A group is never split.",
    )
    micro_batch_tokens: int = Field(8192, ge=16, description="Max padded tokens per forward and backward pass.")
    learning_rate: Positive | None = Field(
        None,
        le=1,
        description="Actor's learning rate (AdamW). Empty: chosen by the number of weights: 1e-6 from 1 B on, inversely"
        " proportional below, at most 3e-4; with `models.lora` 40 times that, at most 1e-3.",
    )
    critic_learning_rate: Positive | None = Field(
        None,
        le=1,
        description="Critic's learning rate (AdamW). Empty: ten times what an empty `learning_rate` gives, at most 1e-3.",
    )
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up of both learning rates, steps.")
    critic_warmup_steps: int | None = Field(
        None, ge=0, description="Warm-up of the critic, steps; empty: same as `warmup_steps`."
    )
    schedule: Schedule = Field("constant", description="Learning rate schedule of the actor after its warm-up.")
    critic_schedule: Schedule = Field("constant", description="Learning rate schedule of the critic after its warm-up.")
    final_rate: Share = Field(0.1, description="Final learning rate of a decaying schedule, as a share of the peak.")
    value_warmup_steps: int = Field(
        0, ge=0, description="Initial steps that train only the critic; the actor's schedule starts after them."
    )
    weight_decay: float = Field(0.0, ge=0, le=1, description="AdamW's decoupled weight decay.")
    clip_range: Positive = Field(0.2, le=10, description="ε of the clipped policy ratio.")
    clip_range_high: float | None = Field(
        None, gt=0, le=10, description="ε above 1 (clip-higher, DAPO, arXiv 2503.14476 §3.1); same as `clip_range` when empty."
    )
    loss_aggregation: Literal["token_mean", "sequence_mean", "token_sum"] = Field(
        "token_mean",
        description="Mean over all tokens of a mini-batch; mean over responses of each one's token mean (GRPO, arXiv 2402.03300);"
        " or mean over responses of their token sum ÷ `max_new_tokens` (Dr. GRPO, arXiv 2503.20783).",
    )
    dual_clip: float | None = Field(None, gt=1, description="Upper bound of the loss for negative advantages; off when empty.")
    value_clip_range: float | None = Field(0.2, gt=0, description="Clip range of the value loss; off when empty.")
    gamma: Share = Field(1.0, description="Discount factor per token.")
    gae_lambda: Share = Field(0.95, description="λ of generalised advantage estimation.")
    whiten_advantages: bool = Field(
        True,
        description="PPO: whiten advantages over the response tokens of the whole batch. Not applied to GRPO and RLOO.",
    )
    entropy_coefficient: float = Field(0.0, ge=0, le=10, description="Weight of the entropy bonus.")
    max_grad_norm: Positive = Field(1.0, description="Gradient clipping, L2 norm.")
    normalize_advantages_by_std: bool = Field(
        True, description="GRPO: divide by the group's standard deviation (off: Dr. GRPO, arXiv 2503.20783)."
    )
    dynamic_sampling: int = Field(
        0,
        ge=0,
        le=100,
        description="GRPO, RLOO: replacements per step of groups whose responses all have the same score by groups of new prompts"
        " (DAPO, arXiv 2503.14476 §3.2); 0: none.",
    )
    missing_eos_penalty: float = Field(
        0.0, ge=0, description="Subtracted from the score of a response truncated at the length limit."
    )
    length_penalty: float = Field(
        0.0, ge=0, le=1000, description="Subtracted from the score for each token beyond `length_penalty_from`."
    )
    length_penalty_from: int = Field(0, ge=0, description="Response tokens without length penalty.")
    score_scale: float = Field(1.0, gt=0, le=1000, description="Factor of the (normalised) score, before penalties and clipping.")
    normalize_scores: Literal["off", "running"] = Field(
        "off", description="Normalize scores by the running mean and standard deviation of raw scores, including this batch."
    )
    whiten_rewards: bool = Field(False, description="Scale per-token rewards to unit variance over the batch, keeping the mean.")
    score_clip: float | None = Field(None, gt=0, description="Scores are clipped to ± this; off when empty.")
    kl: Kl = Field(default_factory=Kl, description="KL penalty to the reference policy.")
    tis: Literal["off", "stale", "all"] = Field(
        "stale",
        description="Tokens with a truncated importance weight (TIS). Default with bfloat16 or vLLM, where sampler and trainer"
        " round differently: `all`.",
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Exponential moving average of the actor's weights with this decay per step; off when empty.",
    )
    on_nonfinite: Literal["raise", "skip"] = Field(
        "raise", description="A score, loss or gradient that is not finite ends the run, or skips the step."
    )
    nonfinite_limit: int = Field(3, ge=1, le=1000, description="Consecutive such steps after which the run fails.")
    pretraining: Pretraining | None = Field(
        None, description="Pretraining text mixed into the actor's update (PPO-ptx); off when empty."
    )
    tis_cap: float = Field(2.0, ge=1, le=100, description="Upper bound of the importance weight.")
    tis_floor: float = Field(0.0, ge=0, le=1, description="Lower bound of the importance weight.")
    tis_outside: Literal["clamp", "mask", "reject"] = Field(
        "clamp",
        description="Beyond the bounds: `clamp` the weight, `mask` the token (weight 0; IcePop), or `reject` responses whose"
        " geometric mean ratio is outside (weight 0 for all their tokens) and clamp the others.",
    )

    @property
    def rows(self) -> int:
        """Responses trained per step: B × G."""
        return self.batch_size * self.group_size

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained: PPO only."""
        return self.algorithm == "ppo"

    @property
    def is_regularized(self) -> bool:
        """Whether the policy loss has a term without advantages: an entropy bonus or a KL penalty."""
        return bool(self.entropy_coefficient) or self.kl.placement == "loss"

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per PPO step, for actor and critic each."""
        return self.epochs * self.mini_batches

    @model_validator(mode="after")
    def check_pretraining_sequences(self) -> Self:
        if self.pretraining is not None and self.pretraining.sequences % self.mini_batches:
            message, allowed = f"cannot be divided into {self.mini_batches} mini_batches", f"a multiple of {self.mini_batches}"
            raise SettingError("pretraining.sequences", message, value=self.pretraining.sequences, allowed=allowed)
        return self

    @model_validator(mode="after")
    def check_group_size(self) -> Self:
        if (self.algorithm == "ppo") != (self.group_size == 1):
            allowed = "1" if self.algorithm == "ppo" else "2 or more"
            raise SettingError("group_size", f"does not fit algorithm {self.algorithm}", value=self.group_size, allowed=allowed)
        return self

    @model_validator(mode="after")
    def check_unused_settings(self) -> Self:
        without: tuple[str, ...] = () if self.has_critic else CRITIC_SETTINGS
        if self.critic_learning_rate == FORMER_CRITIC_RATE:
            without = without[1:]
        for name in (*without, *(() if self.algorithm == "grpo" else ("normalize_advantages_by_std",))):
            self.reject_unused(name, f"with algorithm {self.algorithm}")
        if self.has_critic:
            self.reject_unused("dynamic_sampling", "without groups", "algorithm grpo or rloo")
        if self.tis == "off":
            for name in ("tis_cap", "tis_floor", "tis_outside"):
                self.reject_unused(name, "when no token has a weight", "tis stale or all")
        if self.schedule == self.critic_schedule == "constant":
            self.reject_unused("final_rate", "when no learning rate decays", "another schedule or critic_schedule than constant")
        if not self.length_penalty:
            self.reject_unused("length_penalty_from", "without a length penalty", "a length_penalty above 0")
        if self.on_nonfinite == "raise":
            self.reject_unused("nonfinite_limit", "where the first such step ends the run", "on_nonfinite skip")
        return self

    @model_validator(mode="after")
    def check_mini_batches(self) -> Self:
        if self.batch_size % self.mini_batches:
            divisors = [d for d in range(1, self.batch_size + 1) if self.batch_size % d == 0]
            nearest = min(divisors, key=lambda d: abs(d - self.mini_batches))
            raise SettingError(
                "mini_batches",
                f"batch_size {self.batch_size} cannot be divided into {self.mini_batches} mini_batches",
                value=self.mini_batches,
                allowed=f"a divisor of {self.batch_size}, the nearest is {nearest}",
            )
        return self
