"""Spec sections of models and rewards: weights of the four roles, reward models, rules, services, LoRA."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from oppo_contract.fields import ALLOWED
from oppo_contract.model_folder import may_be_hub_id, split_hub_id
from oppo_contract.sections.base import Path, Positive, Section
from oppo_contract.spec_errors import SettingError

RULE_WORDS = "the name of a registered rule: lower-case letters, digits and _ . : -"
URL_WORDS = "an http or https address"
VLLM_MAX_RANK = 512  # of the adapters that vLLM decodes with
ENV_WORDS = "the name of an environment variable that begins with OPPO_REWARD_: capital letters, digits and _"


def hub_advice(path: str) -> str:
    """Advice for a path that looks like a hub model id, `owner/name`; otherwise empty."""
    if not may_be_hub_id(path):
        return ""
    name, revision = split_hub_id(path)
    option = f" --revision {revision}" if revision else ""
    download = f"hf download {name}{option} --local-dir MODELS_ROOT/{path.partition('/')[2]}"
    return f"; download a hub model first: {download} (or let workers do it: OPPO_ALLOW_HUB=1)"


def _check_exactly_one(section: Section, *names: str) -> None:
    given, first = [name for name in names if getattr(section, name) is not None], ", ".join(names[:-1])
    if len(given) != 1:
        message = f"give exactly one of {first} and {names[-1]}"
        raise SettingError("", message, value=given, allowed=f"{first} or {names[-1]}")


class TinyArchitecture(Section):
    """The built-in small transformer, randomly initialised: for tests, benchmarks and demos."""

    hidden: int = Field(64, ge=8, le=2048, multiple_of=8, description="Width of the residual stream, units.")
    layers: int = Field(2, ge=1, le=64, description="Transformer blocks.")
    heads: int = Field(4, ge=1, le=64, description="Attention heads; must divide `hidden`.")
    context: int = Field(512, ge=8, le=131072, description="Context length (prompt plus response), tokens.")
    vocab: int = Field(64, ge=4, le=262144, description="Size of the vocabulary, tokens.")

    @model_validator(mode="after")
    def check_heads(self) -> Self:
        if self.hidden % self.heads:
            message, allowed = f"hidden {self.hidden} cannot be divided among {self.heads} heads", f"a divisor of {self.hidden}"
            raise SettingError("heads", message, value=self.heads, allowed=allowed)
        return self


class ModelSpec(Section):
    """Source of a model's weights: exactly one of `path` and `tiny`."""

    path: Path | None = Field(
        None,
        description="On the platform: an id from a worker's catalogue. With `oppo train` also a local folder with config.json and"
        " safetensors. A hub's model is downloaded first, or `owner/name@revision` where the worker allows it (OPPO_ALLOW_HUB).",
    )
    tiny: TinyArchitecture | None = Field(None, description="A randomly initialised small model instead of a folder.")

    @model_validator(mode="after")
    def check_one_source(self) -> Self:
        _check_exactly_one(self, "path", "tiny")
        return self


class HttpReward(Section):
    """An HTTP reward service: receives responses as JSON, returns a score for each (docs/rewards.md)."""

    url: str = Field(
        pattern=r"^https?://[^\s]+$",
        max_length=1024,
        json_schema_extra={ALLOWED: URL_WORDS},
        description="URL that responses are posted to; the worker must allow its host (OPPO_REWARD_HOSTS).",
    )
    timeout_s: Positive = Field(10.0, le=600, description="Timeout of one request, seconds.")
    attempts: int = Field(3, ge=1, le=10, description="Attempts per request, with exponential backoff.")
    requests_at_once: int = Field(4, ge=1, le=64, description="Maximum concurrent requests.")
    answers_a_request: int = Field(8, ge=1, le=256, description="Responses per request.")
    break_after: int = Field(5, ge=1, le=100, description="Consecutive failed requests after which the run fails.")
    token_variable: str | None = Field(
        None,
        pattern=r"^OPPO_REWARD_[A-Z0-9_]+$",
        max_length=120,
        json_schema_extra={ALLOWED: ENV_WORDS},
        description="Worker's environment variable with the service's bearer token.",
    )
    send_line: bool = Field(False, description="Send the prompt's whole JSON line, for example with a reference answer.")


class RewardSource(Section):
    """One source of scores for finished responses."""

    model: ModelSpec | None = Field(None, description="A sequence-classification model with one label.")
    reads: Literal["tokens", "text", "chat"] = Field(
        "tokens",
        description="Input: the actor's tokens as they stream; or, for a model with another tokenizer, the response's"
        " text, tokenized again when it is finished; or prompt and response in the model's chat template.",
    )
    rule: str | None = Field(
        None,
        pattern=r"^[a-z0-9_]+([.:-][a-z0-9_]+)*$",
        max_length=200,
        json_schema_extra={ALLOWED: RULE_WORDS},
        description="A rule or verifier by its registered name (entry points `oppo.rules`); it gets prompt and response as text.",
    )
    http: HttpReward | None = Field(None, description="A reward service.")
    served_by: Literal["torch", "vllm"] = Field(
        "torch",
        description="Engine of a model that reads tokens: torch; or vLLM, in a separate process on the run's GPU, whose"
        " prefix cache computes only the new blocks of a growing response (`pip install '.[gpu]'`).",
    )
    memory_share: float = Field(
        0.15, gt=0, lt=1, description="With `served_by: vllm`: fraction of the GPU's memory for its weights and KV cache."
    )

    @model_validator(mode="after")
    def check_served_by(self) -> Self:
        if self.served_by == "torch":
            self.reject_unused("memory_share", "with served_by torch", "served_by vllm")
            return self
        if self.model is None or self.model.path is None:
            allowed = "torch, or a model with a path and an architecture that vLLM supports"
            raise SettingError("served_by", "requires a model with a path", value="vllm", allowed=allowed)
        if self.reads != "tokens":
            raise SettingError("served_by", "requires reads: tokens", value="vllm", allowed="torch, or reads: tokens")
        return self


class RewardPart(RewardSource):
    """One of several weighted sources."""

    weight: float = Field(1.0, ge=-1000, le=1000, description="Weight of this source in the sum.")

    @model_validator(mode="after")
    def check_one_source(self) -> Self:
        _check_exactly_one(self, "model", "rule", "http")
        return self


class RewardSpec(RewardSource):
    """Source of the reward: a reward model, a rule, a service, or a weighted sum of these."""

    parts: list[RewardPart] | None = Field(None, min_length=1, max_length=8, description="Several sources; their weighted sum.")

    @model_validator(mode="after")
    def check_one_source(self) -> Self:
        _check_exactly_one(self, "model", "rule", "http", "parts")
        return self

    def sources_by_path(self) -> list[tuple[str, RewardPart]]:
        """(path of field `model`, part) of each part."""
        if self.parts is None:
            return [("models.reward.model", self.sources()[0])]
        return [(f"models.reward.parts.{number}.model", part) for number, part in enumerate(self.parts)]

    @property
    def is_remote(self) -> bool:
        """Whether another process computes a part of it: a service or vLLM."""
        return any(source.http is not None or source.served_by == "vllm" for source in self.sources())

    def sources(self) -> list[RewardPart]:
        """The parts; a single source becomes one part of weight 1."""
        if self.parts is not None:
            return self.parts
        return [RewardPart(weight=1.0, **{name: getattr(self, name) for name in RewardSource.model_fields})]


class Lora(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685) instead of full training."""

    rank: int = Field(16, ge=1, le=1024, description="Rank of the adapters.")
    alpha: Positive = Field(32.0, description="Scale of the adapters is alpha ÷ rank.")
    targets: list[Annotated[str, Field(min_length=1, max_length=120)]] | None = Field(
        None,
        min_length=1,
        max_length=32,
        description="Names of the linear layers to adapt; default: all linear layers of a block.",
    )
    critic: bool = Field(True, description="Use adapters for the critic too; otherwise train all its weights.")


class Models(Section):
    """Actor, reward, reference and critic. Reference and critic default to copies of the actor."""

    actor: ModelSpec = Field(description="The policy to train: a causal language model.")
    reward: RewardSpec = Field(description="Source of the reward.")
    reference: ModelSpec | None = Field(None, description="Frozen reference policy of the KL; default: the actor at step 0.")
    critic: Literal["reward", "actor"] | ModelSpec = Field(
        "actor", description="Initial weights of the value model: the reward model's backbone, the actor's backbone, or a model."
    )

    lora: Lora | None = Field(None, description="Train low-rank adapters instead of all weights; off when empty.")

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the actor without its adapters, sharing its weights."""
        return self.lora is not None and self.reference is None

    @model_validator(mode="after")
    def check_critic_source(self) -> Self:
        if self.critic != "reward":
            return self
        message = ""
        if self.reward.model is None:
            message = "starts from the reward model, but the reward is not a single model"
        elif self.reward.reads != "tokens":
            message = "starts from the reward model, but that model has another tokenizer than the actor"
        if message:
            raise SettingError("critic", message, value="reward", allowed="actor, or a mapping with path or tiny")
        return self
