"""`RunSpec`, the whole configuration of a run: the form, the YAML file, the API's body and the engine's settings.

There is no second configuration language. Every field carries its unit and its meaning in its description, which the
form and the documentation print. Symbols (B, Δ, C, v, age) as in docs/algorithm.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from oppo_contract.fields import ALLOWED
from oppo_contract.problems import Impossible, SpecError, problems_of

SPEC_VERSION: Literal[1] = 1
MAX_SPEC_BYTES = 256 * 1024

NAME_WORDS = "1 to 120 letters, digits, spaces and . _ -, the first a letter or digit"
RULE_WORDS = "module:function in lower-case letters, digits, _ and ."
Name = Annotated[
    str,
    Field(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$", json_schema_extra={ALLOWED: NAME_WORDS}),
]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the spec. Unknown keys are errors, values are never coerced, an instance never changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TinyArchitecture(Section):
    """Our own small transformer, randomly initialised: for tests, benches and machines without a model folder."""

    hidden: int = Field(64, ge=8, le=2048, multiple_of=8, description="Width of the residual stream, units.")
    layers: int = Field(2, ge=1, le=64, description="Transformer blocks.")
    heads: int = Field(4, ge=1, le=64, description="Attention heads; must divide `hidden`.")
    context: int = Field(512, ge=8, le=131072, description="Longest prompt plus response, tokens.")
    vocab: int = Field(64, ge=4, le=262144, description="Size of the vocabulary, tokens.")

    @model_validator(mode="after")
    def heads_divide_hidden(self) -> Self:
        if self.hidden % self.heads:
            raise Impossible(
                "heads",
                f"hidden {self.hidden} cannot be divided among {self.heads} heads",
                value=self.heads,
                allowed=f"a divisor of {self.hidden}",
            )
        return self


class ModelSpec(Section):
    """Where a model's weights come from: exactly one of `path` and `tiny`."""

    path: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Id in a worker's catalogue, a local folder with config.json and safetensors, or a hub id.",
    )
    tiny: TinyArchitecture | None = Field(None, description="A randomly initialised small model instead of a folder.")

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            given = sorted(self.model_fields_set)
            raise Impossible("", "give exactly one of path and tiny", value=given, allowed="path or tiny")
        return self


class RewardSpec(Section):
    """What scores a finished answer: a reward model, or a rule known to the engine by name."""

    model: ModelSpec | None = Field(None, description="A sequence-classification model with one label.")
    rule: str | None = Field(
        None,
        pattern=r"^[a-z0-9_]+(\.[a-z0-9_]+)*:[a-z0-9_]+$",
        max_length=200,
        json_schema_extra={ALLOWED: RULE_WORDS},
        description="A rule-based reward, as module:function; the function gets prompt and response as text.",
    )

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if (self.model is None) == (self.rule is None):
            given = sorted(self.model_fields_set)
            raise Impossible("", "give exactly one of model and rule", value=given, allowed="model or rule")
        return self


class Models(Section):
    """The four roles. The reference and the critic default to copies, so that two paths make a run."""

    actor: ModelSpec = Field(description="The policy that is trained: a causal language model.")
    reward: RewardSpec = Field(description="What scores an answer.")
    reference: ModelSpec | None = Field(
        None, description="The frozen policy that KL is measured against; default: the actor at step 0."
    )
    critic: Literal["reward", "actor"] | ModelSpec = Field(
        "actor", description="Where the value model starts: the reward model's or the actor's backbone, or a folder."
    )

    @model_validator(mode="after")
    def critic_has_a_source(self) -> Self:
        if self.critic == "reward" and self.reward.model is None:
            raise Impossible(
                "critic",
                "starts from the reward model, but the reward is a rule",
                value="reward",
                allowed="actor, or a mapping with path or tiny",
            )
        return self


class Data(Section):
    """The prompts."""

    prompts: str = Field(
        min_length=1,
        max_length=1024,
        description="Id in a worker's catalogue or a local JSON Lines file; each line an object with the prompt's text.",
    )
    prompt_field: str = Field("prompt", min_length=1, max_length=120, description="Key of the prompt's text in a line.")
    shuffle: bool = Field(True, description="Draw the prompts in a new order each epoch, from `seed`.")


class Kl(Section):
    """The penalty for leaving the reference policy."""

    coefficient: float = Field(0.05, ge=0, le=100, description="Weight of the KL term; the start value when adaptive.")
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k1", description="Per-token estimator: log-ratio, half its square, or the unbiased low-variance one."
    )
    placement: Literal["reward", "loss"] = Field(
        "reward", description="Subtract it from the per-token reward, or add it to the policy loss."
    )
    controller: Literal["fixed", "adaptive"] = Field("fixed", description="Keep the coefficient, or steer it towards `target`.")
    target: Positive = Field(0.1, description="Wanted mean KL per token for the adaptive controller, nats.")
    horizon: int = Field(10_000, ge=1, description="Sequences over which the adaptive controller corrects.")


class Ppo(Section):
    """The PPO step."""

    batch_size: int = Field(16, ge=1, le=65536, description="B: sequences consumed by one step.")
    epochs: int = Field(1, ge=1, le=64, description="Passes over the batch in one step.")
    mini_batches: int = Field(1, ge=1, le=1024, description="Optimizer steps a pass; must divide the batch size.")
    micro_batch_tokens: int = Field(8192, ge=16, description="Most padded tokens in one forward and backward pass.")
    learning_rate: Positive = Field(1e-6, le=1, description="Actor's learning rate (AdamW).")
    critic_learning_rate: Positive = Field(1e-5, le=1, description="Critic's learning rate (AdamW).")
    warmup_steps: int = Field(0, ge=0, description="Steps over which both learning rates rise linearly.")
    weight_decay: float = Field(0.0, ge=0, le=1, description="AdamW's decoupled weight decay.")
    clip_range: Positive = Field(0.2, le=10, description="ε of the clipped policy ratio.")
    dual_clip: float | None = Field(None, gt=1, description="Upper bound of the loss for negative advantages; off when empty.")
    value_clip_range: float | None = Field(0.2, gt=0, description="Clip range of the value loss; off when empty.")
    gamma: Share = Field(1.0, description="Discount a token.")
    gae_lambda: Share = Field(0.95, description="λ of generalised advantage estimation.")
    whiten_advantages: bool = Field(True, description="Normalise advantages over the response tokens of the whole batch.")
    entropy_coefficient: float = Field(0.0, ge=0, le=10, description="Weight of the entropy bonus.")
    max_grad_norm: Positive = Field(1.0, description="Gradient clipping, L2 norm.")
    missing_eos_penalty: float = Field(
        0.0, ge=0, description="Subtracted from the score of an answer cut off at the length limit."
    )
    score_clip: float | None = Field(None, gt=0, description="Scores are clipped to ± this; off when empty.")
    kl: Kl = Field(default_factory=Kl, description="The penalty for leaving the reference policy.")
    tis: Literal["off", "stale", "all"] = Field("stale", description="Which tokens carry a truncated importance weight.")
    tis_cap: float = Field(2.0, ge=1, le=100, description="Upper bound of that weight.")

    @model_validator(mode="after")
    def mini_batches_divide_batch(self) -> Self:
        if self.batch_size % self.mini_batches:
            divisors = [d for d in range(1, self.batch_size + 1) if self.batch_size % d == 0]
            nearest = min(divisors, key=lambda d: abs(d - self.mini_batches))
            raise Impossible(
                "mini_batches",
                f"batch_size {self.batch_size} cannot be divided into {self.mini_batches} mini_batches",
                value=self.mini_batches,
                allowed=f"a divisor of {self.batch_size}, the nearest is {nearest}",
            )
        return self


class Rollout(Section):
    """How the actor answers."""

    max_new_tokens: int = Field(512, ge=1, le=131072, description="Longest response, tokens, its end-of-sequence token included.")
    max_prompt_tokens: int = Field(
        256, ge=1, le=131072, description="Longest prompt, tokens; a longer one is refused before the run starts."
    )
    temperature: float = Field(1.0, gt=0, le=10, description="Divides the logits, in sampling and in training.")


class Overcommit(Section):
    """Δ, the extra sequences in flight, and the controller that moves it."""

    controller: Literal["fixed", "slope"] = Field("slope", description="Keep Δ at `initial`, or follow the slope of the reward.")
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

    intra_step: Literal["off", "per_chunk"] = Field(
        "per_chunk", description="Stream chunks to the scorers while the actor decodes, or score afterwards."
    )
    inter_step: Literal["off", "defer"] = Field(
        "defer", description="Carry unfinished answers into the next step, or wait for the longest."
    )
    overcommit: Overcommit = Field(default_factory=Overcommit, description="Δ, the extra sequences in flight.")
    max_age: int = Field(2, ge=1, le=1000, description="Steps for which an answer may be deferred before the batch waits for it.")
    chunk: Chunk = Field(default_factory=Chunk, description="C, the tokens between two hand-overs.")


class Resources(Section):
    """What the run needs from a node."""

    devices: int = Field(1, ge=1, le=4096, description="GPUs; on a node without GPUs, its one cpu device.")
    kind: Literal["any", "cpu", "cuda"] = Field("any", description="Which devices will do.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision of weights and arithmetic.")
    cpu_threads: int | None = Field(None, ge=1, le=1024, description="Cores the engine may use; empty: all of the node's.")


class Budget(Section):
    """When to stop, and what to aim for."""

    max_hours: float | None = Field(None, gt=0, description="The run ends with a checkpoint after this many hours of training.")
    target_reward: float | None = Field(
        None, description="Drawn into the charts and used for time-to-target; does not stop the run."
    )


class Checkpoints(Section):
    """When the state is saved."""

    every_steps: int = Field(100, ge=1, description="Steps between two checkpoints; the last step always writes one.")
    keep: int = Field(2, ge=1, description="Newest checkpoints to keep.")


class Logging(Section):
    """What a run tells besides its metrics."""

    samples_per_step: int = Field(2, ge=0, le=64, description="Answers recorded a step, as text.")
    spans_every: int = Field(1, ge=1, description="Record the timeline of every n-th step.")


class RunSpec(Section):
    """One PPO-RLHF run, whole."""

    version: Literal[1] = Field(SPEC_VERSION, description="Version of this schema.")
    name: Name = Field(description="The run's name, as it is shown.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of sampling, shuffling and initialisation.")
    steps: int = Field(ge=1, le=10_000_000, description="PPO steps to train.")
    models: Models = Field(description="The four roles.")
    data: Data = Field(description="The prompts.")
    ppo: Ppo = Field(default_factory=Ppo, description="The PPO step.")
    rollout: Rollout = Field(default_factory=Rollout, description="How the actor answers.")
    overlap: Overlap = Field(default_factory=Overlap, description="What runs at the same time.")
    resources: Resources = Field(default_factory=Resources, description="What the run needs from a node.")
    budget: Budget = Field(default_factory=Budget, description="When to stop.")
    checkpoints: Checkpoints = Field(default_factory=Checkpoints, description="When the state is saved.")
    logging: Logging = Field(default_factory=Logging, description="What a run tells besides its metrics.")

    @model_validator(mode="after")
    def overcommit_within_batch(self) -> Self:
        if self.overlap.inter_step == "defer" and self.overlap.overcommit.max > self.ppo.batch_size:
            raise Impossible(
                "overlap.overcommit.max",
                "is above ppo.batch_size",
                value=self.overlap.overcommit.max,
                allowed=f"at most {self.ppo.batch_size}",
            )
        return self

    @model_validator(mode="after")
    def tiny_models_hold_an_answer(self) -> Self:
        longest = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        for path, tiny in self.tiny_models():
            if tiny.context < longest:
                raise Impossible(
                    f"{path}.tiny.context",
                    "is below rollout.max_prompt_tokens + rollout.max_new_tokens",
                    value=tiny.context,
                    allowed=f"{longest} or more",
                )
        return self

    def tiny_models(self) -> list[tuple[str, TinyArchitecture]]:
        """The roles that use a built-in architecture, as (field path, architecture)."""
        roles = {
            "models.actor": self.models.actor,
            "models.reference": self.models.reference,
            "models.reward.model": self.models.reward.model,
            "models.critic": self.models.critic,
        }
        return [(path, m.tiny) for path, m in roles.items() if isinstance(m, ModelSpec) and m.tiny is not None]

    @property
    def overcommit_start(self) -> int:
        """Δ at the first step; 0 when nothing is deferred."""
        return self.overlap.overcommit.initial if self.overlap.inter_step == "defer" else 0


def load_spec(data: Any) -> RunSpec:
    """Check plain data (from YAML, JSON or a form) and return the spec.

    Raises:
        SpecError: with one `SpecProblem` for every complaint, each naming the field's path, the value, what is allowed
            and, for an unknown key, the nearest valid one.
    """
    try:
        return RunSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(problems_of(error, RunSpec, data)) from None
