"""`RunSpec`, the whole configuration of a run: the form, the YAML file, the API's body and the engine's settings.

There is no second configuration language. Every field carries its unit and its meaning in its description, which the
form and the documentation print. Symbols (B, Δ, C, v, age) as in docs/algorithm.md. The sections are in `sections/`.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from oppo_contract.retired import replace_retired_settings, drop_unused_settings
from oppo_contract.sections.base import Name, Section
from oppo_contract.sections.models import HttpReward, Lora, Models, ModelSpec, RewardPart, RewardSpec, TinyArchitecture
from oppo_contract.sections.ppo import Kl, Ppo, Pretraining
from oppo_contract.sections.rollout import Chunk, Overcommit, Overlap, Rollout
from oppo_contract.sections.run import Budget, Checkpoints, Data, Evaluation, Fork, Logging, LogRule, Queue, Resources, Retries
from oppo_contract.sections.secrets import SecretRefs, check_references
from oppo_contract.sections.training import Training
from oppo_contract.spec_errors import SettingError, SpecError, translate_errors

__all__ = [
    "MAX_SPEC_BYTES", "PLATFORM_SECTIONS", "SPEC_VERSION", "Budget", "Checkpoints", "Chunk", "Data", "Evaluation",
    "Fork", "HttpReward", "Kl", "LogRule", "Logging", "Lora", "ModelSpec", "Models", "Overcommit", "Overlap", "Ppo",
    "Pretraining", "Queue", "Resources", "Retries", "RewardPart",
    "RewardSpec", "Rollout", "RunSpec", "Section", "TinyArchitecture", "Training", "load_spec", "load_stored_spec",
]  # fmt: skip

SPEC_VERSION: Literal[1] = 1
# Sections that only the platform reads. They are not delivered to engines, so that an older one does not stumble over them.
PLATFORM_SECTIONS = ("fork", "queue", "retries", "secrets")
MAX_SPEC_BYTES = 256 * 1024


def _refuse_with(setting: str, reasons: list[tuple[bool, str, Any, str]]) -> None:
    """Raises Impossible for the first of (applies, path, value, what is allowed) that applies."""
    for applies, path, value, allowed in reasons:
        if applies:
            raise SettingError(path, f"cannot be combined with {setting}", value=value, allowed=allowed)


class RunSpec(Section):
    """One PPO-RLHF run, whole."""

    version: Literal[1] = Field(SPEC_VERSION, description="Version of this schema.")
    name: Name = Field(description="Display name of the run.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of sampling, shuffling and initialisation.")
    steps: int = Field(ge=1, le=10_000_000, description="PPO steps to train.")
    models: Models = Field(description="The four roles.")
    data: Data = Field(description="The prompts.")
    fork: Fork | None = Field(None, description="Start from a checkpoint of another run; off when empty. Platform only.")
    ppo: Ppo = Field(default_factory=Ppo, description="The PPO step.")
    rollout: Rollout = Field(default_factory=Rollout, description="How the actor samples responses.")
    overlap: Overlap = Field(default_factory=Overlap, description="Which stages overlap.")
    training: Training = Field(default_factory=Training, description="Training backend and optimizer sharding.")
    evaluation: Evaluation | None = Field(None, description="Evaluation on held-out prompts during training; off when empty.")
    resources: Resources = Field(default_factory=Resources, description="Devices and cores of the run.")
    queue: Queue = Field(default_factory=Queue, description="Priority and limits in the queue.")
    retries: Retries = Field(default_factory=Retries, description="Retries after a failure of the engine or a node.")
    secrets: SecretRefs | None = Field(
        None,
        description="Secrets of the team that the engine finds in its environment: VARIABLE: secret:NAME. On the platform only.",
    )
    budget: Budget = Field(default_factory=Budget, description="Stopping conditions.")
    checkpoints: Checkpoints = Field(default_factory=Checkpoints, description="When checkpoints are saved.")
    logging: Logging = Field(default_factory=Logging, description="What is recorded besides metrics.")

    @model_validator(mode="after")
    def secrets_are_named(self) -> Self:
        check_references(self.secrets or {})
        return self

    @model_validator(mode="after")
    def a_fork_goes_on(self) -> Self:
        if self.fork is not None and self.steps <= self.fork.step:
            allowed = f"above {self.fork.step}, the step it starts from (fork.step)"
            raise SettingError("steps", "leaves no steps to train", value=self.steps, allowed=allowed)
        return self

    @model_validator(mode="after")
    def overcommit_within_batch(self) -> Self:
        if self.overlap.inter_step != "off" and self.overlap.overcommit.max > self.ppo.batch_size:
            raise SettingError(
                "overlap.overcommit.max",
                "is above ppo.batch_size",
                value=self.overlap.overcommit.max,
                allowed=f"at most {self.ppo.batch_size}",
            )
        return self

    @model_validator(mode="after")
    def update_overlap_is_exact(self) -> Self:
        """Exact only while every ratio is 1 and the whitening statistics enter linearly (docs/algorithm.md)."""
        if not self.overlap.update_overlap:
            return self
        reasons = [
            (self.ppo.epochs > 1, "ppo.epochs", self.ppo.epochs, "1"),
            (self.ppo.mini_batches > 1, "ppo.mini_batches", self.ppo.mini_batches, "1"),
            (self.ppo.whiten_rewards, "ppo.whiten_rewards", True, "false: they need the whole batch before a gradient"),
            (self.ppo.normalize_scores != "off", "ppo.normalize_scores", "running", "off: it needs the whole batch"),
            (self.ppo.on_nonfinite != "raise", "ppo.on_nonfinite", self.ppo.on_nonfinite, "raise"),
            (self.ppo.algorithm != "ppo", "ppo.algorithm", self.ppo.algorithm, "ppo"),
            (self.overlap.intra_step == "off", "overlap.intra_step", "off", "per_sequence or per_chunk"),
            (
                self.resources.dtype == "bfloat16",
                "resources.dtype",
                "bfloat16",
                "float32 or float64: sums of gradients would round",
            ),
            (self.resources.kind == "cuda", "resources.kind", "cuda", "cpu or any: it trains in two processes on CPUs"),
        ]
        if self.training.recompute == "selective":
            reasons.append((True, "training.recompute", "selective", "off, head or full: two gradients are taken of one pass"))
        _refuse_with("overlap.update_overlap", reasons)
        return self

    @model_validator(mode="after")
    def sharded_training_is_possible(self) -> Self:
        if self.training.backend == "plain":
            return self
        reasons = [
            (
                self.resources.dtype == "float64" and self.training.backend == "deepspeed",
                "resources.dtype",
                "float64",
                "float32 or bfloat16: it updates float32 weights",
            ),
            (self.overlap.update_overlap, "overlap.update_overlap", True, "false: it needs the whole gradient in one process"),
            (
                self.ppo.on_nonfinite != "raise",
                "ppo.on_nonfinite",
                self.ppo.on_nonfinite,
                "raise: a sharded backend clips and steps at once",
            ),
            (
                self.ppo.ema_decay is not None,
                "ppo.ema_decay",
                self.ppo.ema_decay,
                "empty: no rank has the full weights to average",
            ),
            (
                self.training.zero_stage == 3 and self.training.recompute != "off",
                "training.recompute",
                self.training.recompute,
                "off, or training.zero_stage 1 or 2: at stage 3 nodes would gather weights unequally often",
            ),
        ]
        _refuse_with(f"training.backend {self.training.backend}", reasons)
        return self

    @model_validator(mode="after")
    def vllm_is_possible(self) -> Self:
        own = self.resources.decoding_devices
        if self.rollout.backend != "vllm":
            _refuse_with("rollout.backend torch", [(bool(own), "resources.decoding_devices", own, "0, or rollout.backend vllm")])
            return self
        reasons = [
            (self.resources.kind == "cpu", "resources.kind", "cpu", "cuda or any: vLLM decodes on a GPU"),
            (self.resources.dtype == "float64", "resources.dtype", "float64", "float32 or bfloat16"),
            (self.models.actor.tiny is not None, "models.actor", "tiny", "path: a model of an architecture that vLLM supports"),
            (self.ppo.tis != "all", "ppo.tis", self.ppo.tis, "all: its log-probs differ from the trainer's by rounding"),
            (self.overlap.update_overlap, "overlap.update_overlap", True, "false: it trains on CPUs"),
            (
                self.rollout.vllm_sleep and self.overlap.kv_after_update == "keep",
                "rollout.vllm_sleep",
                True,
                "false, or overlap.kv_after_update recompute: a sleeping decoder keeps no KV cache",
            ),
        ]
        _refuse_with("rollout.backend vllm", reasons)
        return self

    @model_validator(mode="after")
    def vllm_has_a_place(self) -> Self:
        """In the engine's process, in one of its own, there on GPUs of its own: each has what it does not go with."""
        own = self.resources.decoding_devices
        if self.rollout.backend != "vllm":
            return self
        reasons = [
            (
                self.training.backend != "plain" and self.rollout.vllm_process == "engine",
                "training.backend",
                self.training.backend,
                "plain, or rollout.vllm_process own: in one process both need the default process group",
            ),
            (
                self.training.backend != "plain" and self.resources.ranks > 1 and not own,
                "training.backend",
                self.training.backend,
                "plain, or separate GPUs for vLLM (resources.decoding_devices): otherwise all ranks wait when one vLLM dies",
            ),
            (
                bool(own) and self.rollout.vllm_process == "engine",
                "resources.decoding_devices",
                own,
                "0, or rollout.vllm_process own: the engine's process uses the training GPU",
            ),
            (
                bool(own) and self.rollout.vllm_sleep,
                "rollout.vllm_sleep",
                True,
                "false: vLLM has GPUs of its own (resources.decoding_devices)",
            ),
        ]
        _refuse_with("rollout.backend vllm", reasons)
        return self

    @model_validator(mode="after")
    def scorers_have_a_device(self) -> Self:
        if not self.resources.scoring_devices:
            return self
        reasons = [
            (
                self.training.backend != "plain",
                "training.backend",
                self.training.backend,
                "plain: two threads of a process would call collectives for actor and critic in no fixed order",
            ),
            (self.overlap.update_overlap, "overlap.update_overlap", True, "false: it trains on CPUs"),
        ]
        _refuse_with("resources.scoring_devices", reasons)
        return self

    @model_validator(mode="after")
    def reward_is_served_on_a_gpu(self) -> Self:
        if all(source.served_by == "torch" for source in self.models.reward.sources()):
            return self
        reasons = [
            (self.resources.kind == "cpu", "resources.kind", "cpu", "cuda or any: vLLM reads on a GPU"),
            (self.resources.dtype == "float64", "resources.dtype", "float64", "float32 or bfloat16"),
        ]
        _refuse_with("models.reward.served_by vllm", reasons)
        return self

    @model_validator(mode="after")
    def every_rank_has_its_share(self) -> Self:
        """Each rank trains B ÷ ranks sequences a step, and as many in every mini-batch as the others."""
        ppo, ranks = self.ppo, self.resources.ranks
        if ppo.batch_size % (ranks * ppo.mini_batches):
            raise SettingError(
                "ppo.batch_size",
                f"cannot be divided among {ranks} ranks (a process a device, or resources.processes a node) with"
                f" {ppo.mini_batches} mini-batches on each",
                value=ppo.batch_size,
                allowed=f"a multiple of {ranks * ppo.mini_batches}",
            )
        return self

    @model_validator(mode="after")
    def critic_is_wanted(self) -> Self:
        if not self.ppo.has_critic and self.models.critic != "actor":
            critic = self.models.critic
            raise SettingError(
                "models.critic",
                f"has no effect with ppo.algorithm {self.ppo.algorithm}, which has no critic",
                value=critic if isinstance(critic, str) else critic.model_dump(exclude_none=True),
                allowed="actor (the default)",
            )
        return self

    @model_validator(mode="after")
    def the_actor_is_trained(self) -> Self:
        if self.ppo.value_warmup_steps >= self.steps:
            raise SettingError(
                "ppo.value_warmup_steps",
                f"leaves none of the {self.steps} steps to train the actor",
                value=self.ppo.value_warmup_steps,
                allowed=f"at most {self.steps - 1}, or more steps",
            )
        return self

    @model_validator(mode="after")
    def stopping_at_the_target_needs_one(self) -> Self:
        if self.budget.stop_at_target and self.budget.target_reward is None:
            raise SettingError("budget.stop_at_target", "needs budget.target_reward", value=True, allowed="false, or with a target")
        return self

    @model_validator(mode="after")
    def tiny_models_hold_an_answer(self) -> Self:
        longest = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        for path, tiny in self.tiny_models():
            if tiny.context < longest:
                raise SettingError(
                    f"{path}.tiny.context",
                    "is below rollout.max_prompt_tokens + rollout.max_new_tokens",
                    value=tiny.context,
                    allowed=f"{longest} or more",
                )
        return self

    @property
    def device_kind(self) -> Literal["any", "cpu", "cuda"]:
        """Which devices will do: what `resources.kind` says, less what another setting rules out."""
        kind, sources = self.resources.kind, self.models.reward.sources()
        if kind != "any":
            return kind
        if self.rollout.backend == "vllm" or any(source.served_by == "vllm" for source in sources):
            return "cuda"
        streams_sharded = self.training.backend != "plain" and self.overlap.intra_step != "off"
        return "cpu" if self.overlap.update_overlap or streams_sharded else "any"

    def tiny_models(self) -> list[tuple[str, TinyArchitecture]]:
        """The roles that read the actor's tokens with a built-in architecture, as (field path, architecture)."""
        roles = {
            "models.actor": self.models.actor,
            "models.reference": self.models.reference,
            "models.critic": self.models.critic,
        } | {path: source.model for path, source in self.models.reward.sources_by_path() if source.reads == "tokens"}
        return [(path, m.tiny) for path, m in roles.items() if isinstance(m, ModelSpec) and m.tiny is not None]

    @property
    def initial_overcommit(self) -> int:
        """Δ at the first step; 0 when nothing is deferred."""
        return self.overlap.overcommit.initial if self.overlap.inter_step != "off" else 0


def load_spec(data: Any) -> RunSpec:
    """Check plain data (from YAML, JSON or a form) and return the spec. Retired settings that are off are left out.

    Raises:
        SpecError: with one `SpecProblem` for every complaint, each naming the field's path, the value, what is allowed
            and, for an unknown key, the nearest valid one.
    """
    data = drop_unused_settings(data)
    try:
        return RunSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(translate_errors(error, RunSpec, data)) from None


def load_stored_spec(data: Any) -> RunSpec:
    """The spec that an older run or checkpoint holds: values that are gone are read as `oppo_contract.retired` says.

    Raises:
        SpecError: as `load_spec`.
    """
    return load_spec(replace_retired_settings(data))
