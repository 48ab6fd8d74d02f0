"""`RunSpec`: the configuration of a run, for the form, the YAML file, the API body and the engine.

The submit form and the documentation show each field's description, which has its meaning and unit. Symbols (B, Δ, C, v, age) as
in docs/algorithm.md. The sections are in `sections/`; validators here check settings of several sections.
"""

from __future__ import annotations

from functools import reduce
from types import NoneType
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from oppo_contract.retired import drop_unused_settings, replace_retired_settings
from oppo_contract.sections.base import STORED, Name, Section
from oppo_contract.sections.models import (
    VLLM_MAX_RANK,
    HttpReward,
    Lora,
    Models,
    ModelSpec,
    RewardPart,
    RewardSpec,
    TinyArchitecture,
)
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
# Sections that only the platform reads. Not sent to engines, which may be older and reject unknown keys.
PLATFORM_SECTIONS = ("fork", "queue", "retries", "secrets")
MAX_SPEC_BYTES = 256 * 1024


class RunSpec(Section):
    """Configuration of one PPO-RLHF run."""

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

    @model_validator(mode="before")
    @classmethod
    def default_tis(cls, data: Any) -> Any:
        """`ppo.tis` is `all` by default where sampler and trainer round differently."""
        if not isinstance(data, dict):
            return data
        ppo, resources, rollout = (data.get(name, {}) for name in ("ppo", "resources", "rollout"))
        if not all(isinstance(section, dict) for section in (ppo, resources, rollout)) or "tis" in ppo:
            return data
        rounds = resources.get("dtype") == "bfloat16" or rollout.get("backend") == "vllm"
        return data | {"ppo": ppo | {"tis": "all"}} if rounds else data

    @model_validator(mode="before")
    @classmethod
    def default_overcommit(cls, data: Any) -> Any:
        """The defaults of Δ follow: its maximum is at most B, its initial value between its minimum and its maximum.

        Without deferral, where they have no effect, only if a bound is given.
        """
        if not isinstance(data, dict):
            return data
        ppo, overlap = data.get("ppo", {}), data.get("overlap", {})
        given = overlap.get("overcommit", {}) if isinstance(overlap, dict) else None
        if not isinstance(ppo, dict) or not isinstance(given, dict):
            return data
        usual = Overcommit()
        batch = ppo.get("batch_size", Ppo.model_fields["batch_size"].default)
        least, most = given.get("min", usual.min), given.get("max")
        refused = not type(batch) is type(least) is int or type(most) not in (int, NoneType) or batch < 1
        is_off = overlap.get("inter_step", Overlap.model_fields["inter_step"].default) == "off"
        if refused or (is_off and not {"min", "max"} & given.keys()):
            return data
        most = min(batch, max(least, usual.max)) if most is None else most
        initial = max(least, min(usual.initial, most))
        if (most, initial) == (usual.max, usual.initial):
            return data
        return data | {"overlap": overlap | {"overcommit": {"max": most, "initial": initial} | given}}

    def _check_conflicts(self, setting: str, conflicts: list[tuple[str, bool, str]]) -> None:
        """Raise SettingError for the first of (path, whether it conflicts with `setting`, allowed values) that applies."""
        for path, applies, allowed in conflicts:
            if applies:
                value = reduce(getattr, path.split("."), self)
                shown = value.model_dump(exclude_none=True) if isinstance(value, Section) else value
                raise SettingError(path, f"cannot be combined with {setting}", value=shown, allowed=allowed)

    @model_validator(mode="after")
    def check_secret_references(self) -> Self:
        check_references(self.secrets or {})
        return self

    @model_validator(mode="after")
    def check_fork_step(self) -> Self:
        if self.fork is not None and self.steps <= self.fork.step:
            allowed = f"above {self.fork.step}, the step it starts from (fork.step)"
            raise SettingError("steps", "leaves no steps to train", value=self.steps, allowed=allowed)
        return self

    @model_validator(mode="after")
    def check_overcommit(self) -> Self:
        value, limit = self.overlap.overcommit.max, self.ppo.batch_size
        if self.overlap.inter_step != "off" and value > limit:
            raise SettingError("overlap.overcommit.max", "is above ppo.batch_size", value=value, allowed=f"at most {limit}")
        return self

    @model_validator(mode="after")
    def check_update_overlap(self) -> Self:
        """Exact only if every ratio is 1 and the whitening statistics enter linearly (docs/algorithm.md)."""
        if not self.overlap.update_overlap:
            return self
        ppo, resources, recompute = self.ppo, self.resources, self.training.recompute
        conflicts = [
            ("ppo.epochs", ppo.epochs > 1, "1"),
            ("ppo.mini_batches", ppo.mini_batches > 1, "1"),
            ("ppo.loss_aggregation", ppo.loss_aggregation != "token_mean", "token_mean"),
            ("ppo.whiten_rewards", ppo.whiten_rewards, "false: they need the whole batch before a gradient"),
            ("ppo.normalize_scores", ppo.normalize_scores != "off", "off: it needs the whole batch"),
            ("ppo.on_nonfinite", ppo.on_nonfinite != "raise", "raise"),
            ("ppo.algorithm", ppo.algorithm != "ppo", "ppo"),
            ("overlap.intra_step", self.overlap.intra_step == "off", "per_sequence or per_chunk"),
            ("resources.dtype", resources.dtype == "bfloat16", "float32 or float64: sums of gradients would round"),
            ("resources.kind", resources.kind == "cuda", "cpu or any: it trains in two processes on CPUs"),
            ("training.recompute", recompute == "selective", "off, head or full: two gradients are taken of one pass"),
        ]
        self._check_conflicts("overlap.update_overlap", conflicts)
        return self

    @model_validator(mode="after")
    def check_sharded_training(self) -> Self:
        ppo, training, overlap = self.ppo, self.training, self.overlap.update_overlap
        if training.backend == "plain":
            return self
        float64 = self.resources.dtype == "float64" and training.backend == "deepspeed"
        conflicts = [
            ("resources.dtype", float64, "float32 or bfloat16: it updates float32 weights"),
            ("overlap.update_overlap", overlap, "false: it needs the whole gradient in one process"),
            ("ppo.on_nonfinite", ppo.on_nonfinite != "raise", "raise: a sharded backend clips and steps at once"),
            ("ppo.ema_decay", ppo.ema_decay is not None, "empty: no rank has the full weights to average"),
        ]
        self._check_conflicts(f"training.backend {training.backend}", conflicts)
        return self

    @model_validator(mode="after")
    def check_vllm(self) -> Self:
        dtype, decoding = self.resources.dtype, self.resources.decoding_devices
        on_cpu = self.resources.kind == "cpu"
        if self.rollout.backend != "vllm":
            conflict = ("resources.decoding_devices", bool(decoding), "0, or rollout.backend vllm")
            self._check_conflicts("rollout.backend torch", [conflict])
            return self
        tiny, lora = self.models.actor.tiny is not None, self.models.lora
        sleeps = self.rollout.vllm_sleep and self.overlap.kv_after_update == "keep"
        keeps = "false, or overlap.kv_after_update recompute: a sleeping decoder keeps no KV cache"
        conflicts = [
            ("resources.dtype", dtype == "float64", "float32 or bfloat16"),
            ("models.actor", tiny, "path: a model of an architecture that vLLM supports"),
            ("models.lora.rank", lora is not None and lora.rank > VLLM_MAX_RANK, f"{VLLM_MAX_RANK} or less"),
            ("ppo.tis", self.ppo.tis != "all", "all: its log-probs differ from the trainer's by rounding"),
            ("overlap.update_overlap", self.overlap.update_overlap, "false: it trains on CPUs"),
            ("rollout.vllm_sleep", sleeps, keeps),
            ("rollout.vllm_sleep", self.rollout.vllm_sleep and on_cpu, "false: on a CPU vLLM cannot release memory"),
            ("rollout.top_k", self.rollout.has_sampling_mask and on_cpu, "no filters: on a CPU vLLM reports no sampling mask"),
        ]
        self._check_conflicts("rollout.backend vllm", conflicts)
        return self

    @model_validator(mode="after")
    def check_vllm_placement(self) -> Self:
        if self.rollout.backend != "vllm":
            return self
        decoding, sharded = bool(self.resources.decoding_devices), self.training.backend != "plain"
        gpus = "plain, or separate GPUs for vLLM (resources.decoding_devices): otherwise all ranks wait when one vLLM dies"
        conflicts = [
            ("training.backend", sharded and self.resources.ranks > 1 and not decoding, gpus),
            (
                "rollout.vllm_sleep",
                decoding and self.rollout.vllm_sleep,
                "false: vLLM has GPUs of its own (resources.decoding_devices)",
            ),
        ]
        self._check_conflicts("rollout.backend vllm", conflicts)
        return self

    @model_validator(mode="after")
    def check_scoring_devices(self) -> Self:
        if not self.resources.scoring_devices:
            return self
        threads = "plain: two threads of a process would call collectives for actor and critic in no fixed order"
        if self.training.shards_weights:
            threads = "plain: fsdp2 shards the scorers' models over the same devices as the actor's"
        conflicts = [
            ("training.backend", self.training.backend != "plain", threads),
            ("overlap.update_overlap", self.overlap.update_overlap, "false: it trains on CPUs"),
        ]
        self._check_conflicts("resources.scoring_devices", conflicts)
        return self

    @model_validator(mode="after")
    def check_reward_serving(self) -> Self:
        if all(source.served_by == "torch" for source in self.models.reward.sources()):
            return self
        conflicts = [
            ("resources.dtype", self.resources.dtype == "float64", "float32 or bfloat16"),
        ]
        self._check_conflicts("models.reward.served_by vllm", conflicts)
        return self

    @model_validator(mode="after")
    def check_rows_for_ranks(self) -> Self:
        """A rank without a response would only wait for the others."""
        ranks = self.resources.ranks
        if self.ppo.rows < ranks:
            raise SettingError(
                "ppo.batch_size",
                f"gives a step {self.ppo.rows} responses, too few for {ranks} ranks (one per device, or resources.processes per"
                " node)",
                value=self.ppo.batch_size,
                allowed=f"{-(-ranks // self.ppo.group_size)} or more",
            )
        return self

    @model_validator(mode="after")
    def check_critic_is_used(self) -> Self:
        critic = self.models.critic
        if not self.ppo.has_critic and critic != "actor":
            raise SettingError(
                "models.critic",
                f"has no effect with ppo.algorithm {self.ppo.algorithm}, which has no critic",
                value=critic if isinstance(critic, str) else critic.model_dump(exclude_none=True),
                allowed="actor (the default)",
            )
        return self

    @model_validator(mode="after")
    def check_dynamic_sampling(self) -> Self:
        tail_batch = self.overlap.inter_step == "tail_batch"
        conflict = ("overlap.inter_step", bool(self.ppo.dynamic_sampling) and tail_batch, "off or defer")
        self._check_conflicts("ppo.dynamic_sampling", [conflict])
        return self

    @model_validator(mode="after")
    def check_retained_passes(self) -> Self:
        training, steps = self.training, self.ppo.optimizer_steps
        frees = training.backend == "fsdp2"
        if training.retained_passes != 1 and (steps > 1 or frees):
            reason = f"with {steps} optimizer steps per batch" if steps > 1 else "where weights are freed after each pass"
            raise SettingError(
                "training.retained_passes", f"has no effect {reason}", value=training.retained_passes, allowed="1 (the default)"
            )
        return self

    @model_validator(mode="after")
    def check_value_warmup(self) -> Self:
        warmup = self.ppo.value_warmup_steps
        if warmup >= self.steps:
            message = f"leaves none of the {self.steps} steps to train the actor"
            raise SettingError(
                "ppo.value_warmup_steps", message, value=warmup, allowed=f"at most {self.steps - 1}, or more steps"
            )
        return self

    @model_validator(mode="after")
    def check_stop_at_target(self) -> Self:
        if self.budget.stop_at_target and self.budget.target_reward is None:
            allowed = "false, or with a target"
            raise SettingError("budget.stop_at_target", "needs budget.target_reward", value=True, allowed=allowed)
        return self

    @model_validator(mode="after")
    def check_tiny_context(self) -> Self:
        longest = self.rollout.max_prompt_tokens + self.rollout.max_new_tokens
        message = "is below rollout.max_prompt_tokens + rollout.max_new_tokens"
        for path, tiny in self.tiny_models():
            if tiny.context < longest:
                raise SettingError(f"{path}.tiny.context", message, value=tiny.context, allowed=f"{longest} or more")
        return self

    @property
    def device_kind(self) -> Literal["any", "cpu", "cuda"]:
        """Device kind to allocate: `resources.kind`, narrowed by settings that need a CPU or a GPU."""
        kind, sources = self.resources.kind, self.models.reward.sources()
        if kind != "any":
            return kind
        if self.rollout.backend == "vllm" or any(source.served_by == "vllm" for source in sources):
            return "cuda"
        streams_deepspeed = self.training.backend == "deepspeed" and self.overlap.intra_step != "off"
        return "cpu" if self.overlap.update_overlap or streams_deepspeed else "any"

    def tiny_models(self) -> list[tuple[str, TinyArchitecture]]:
        """(field path, architecture) of each tiny model that reads the actor's tokens."""
        roles = {
            "models.actor": self.models.actor,
            "models.reference": self.models.reference,
            "models.critic": self.models.critic,
        } | {path: source.model for path, source in self.models.reward.sources_by_path() if source.reads == "tokens"}
        return [(path, m.tiny) for path, m in roles.items() if isinstance(m, ModelSpec) and m.tiny is not None]

    def role_models(self) -> dict[str, ModelSpec]:
        """The model of each role that the run loads, the actor first; rewards are numbered from 1."""
        named = self.models
        models = {"actor": named.actor, "reference": named.reference or named.actor}
        if self.ppo.has_critic:
            sources = {"actor": named.actor, "reward": named.reward.model}
            critic = sources[named.critic] if isinstance(named.critic, str) else named.critic
            assert critic is not None  # validated: `reward` needs a single model
            models["critic"] = critic
        for number, source in enumerate(named.reward.sources(), start=1):
            if source.model is not None:
                models[f"reward {number}"] = source.model
        return models

    @property
    def initial_chunk_size(self) -> int:
        """C at the first step. Empty: a response of maximum length has at least four chunks, so that its scoring overlaps."""
        if self.overlap.chunk.size is not None:
            return self.overlap.chunk.size
        return min(32, max(8, 1 << max(0, (self.rollout.max_new_tokens // 4).bit_length() - 1)))

    @property
    def initial_overcommit(self) -> int:
        """Δ at the first step; 0 without deferral."""
        return self.overlap.overcommit.initial if self.overlap.inter_step != "off" else 0


def load_spec(data: Any, context: dict[str, bool] | None = None) -> RunSpec:
    """Validate plain data (from YAML, JSON or a form). Removed settings that had no effect are ignored.

    Raises:
        SpecError: with one `SpecProblem` per error.
    """
    data = drop_unused_settings(data)
    try:
        return RunSpec.model_validate(data, context=context)
    except ValidationError as error:
        raise SpecError(translate_errors(error, RunSpec, data)) from None


def load_stored_spec(data: Any) -> RunSpec:
    """Validate the spec of a stored run or checkpoint; `oppo_contract.retired` replaces removed settings. Raises SpecError."""
    return load_spec(replace_retired_settings(data), STORED)
