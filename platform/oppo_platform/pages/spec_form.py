"""The submit form: its fields, and the spec it starts from. Pure functions of the catalogue.

The form is a view of the spec: each field has the path of a spec field and its description from the schema. Fields without an
input stay as they are in the YAML.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from oppo_contract.presets import EXAMPLES, PRESETS, Preset, example_text
from oppo_contract.spec import (
    SPEC_VERSION,
    Budget,
    Checkpoints,
    Logging,
    Overlap,
    Ppo,
    Queue,
    Resources,
    Rollout,
    RunSpec,
    Section,
)
from oppo_contract.wire import CatalogueEntry
from oppo_contract.yaml_text import load_yaml

FIRST_STEPS = 200
GENERAL_RULE = "sentiment:compound"
BUILT_IN_RULES = frozenset({"letters:score", "math:verify", GENERAL_RULE})


@dataclass(frozen=True, slots=True)
class FormField:
    """One input. `kind`: text, whole, number (empty means null), choice, actor, reward, critic, prompts, or devices.

    `only`: `path=value,value`, the values of another setting with which this one has an effect.
    """

    path: str
    label: str
    kind: str
    unit: str = ""
    only: str = ""

    @property
    def id(self) -> str:
        """The input's id."""
        return "f-" + self.path.replace(".", "-")

    @property
    def help(self) -> str:
        """The description of the spec's field."""
        return description(self.path)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of a choice."""
        return get_args(_schema(self.path).annotation)


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """A titled part of the form."""

    title: str
    fields: tuple[FormField, ...]


DEFER = "overlap.inter_step=defer"
GROUPS = (
    FieldGroup(
        "Models and data",
        (
            FormField("name", "Name", "text"),
            FormField("models.actor", "Actor", "actor"),
            FormField("models.reward", "Reward", "reward"),
            FormField("models.critic", "Critic init", "critic", only="ppo.algorithm=ppo"),
            FormField("data.prompts", "Prompts", "prompts"),
        ),
    ),
    FieldGroup(
        "PPO step",
        (
            FormField("steps", "Steps", "whole"),
            FormField("ppo.batch_size", "Batch size B", "whole", "prompts per step"),
            FormField("ppo.algorithm", "Algorithm", "choice"),
            FormField("ppo.group_size", "Group size G", "whole", "responses per prompt", "ppo.algorithm=grpo,rloo"),
            FormField("rollout.max_new_tokens", "Max response length", "whole", "tokens"),
            FormField("rollout.max_prompt_tokens", "Max prompt length", "whole", "tokens"),
            FormField("ppo.learning_rate", "Learning rate", "number", "actor"),
            FormField("ppo.critic_learning_rate", "Learning rate", "number", "critic", "ppo.algorithm=ppo"),
            FormField("ppo.kl.coefficient", "KL coefficient", "number"),
            FormField("seed", "Seed", "whole"),
            FormField("budget.target_reward", "Target reward", "number", "optional"),
        ),
    ),
    FieldGroup(
        "Overlap",
        (
            FormField("overlap.overcommit.initial", "Initial extra rollouts in flight Δ", "whole", "rollouts", DEFER),
            FormField("overlap.overcommit.max", "Max extra rollouts in flight (Δ)", "whole", "rollouts", DEFER),
            FormField("overlap.max_age", "Max staleness", "whole", "steps", DEFER),
            FormField("overlap.chunk.size", "Chunk size C", "whole", "tokens"),
        ),
    ),
    FieldGroup(
        "Resources",
        (
            FormField("resources.devices", "Devices", "whole"),
            FormField("resources.nodes", "Nodes", "whole"),
            FormField("resources.processes", "Processes per node", "whole", "optional"),
            FormField("budget.max_hours", "Time limit", "number", "hours of training, optional"),
            FormField("queue.max_runtime_hours", "Max runtime", "number", "hours on devices, optional"),
            FormField("queue.priority", "Priority", "whole", "1 to 99"),
        ),
    ),
)


def description(path: str) -> str:
    """The schema's description of the field at a dotted path."""
    return _schema(path).description or ""


def _schema(path: str) -> FieldInfo:
    model: type[Section] = RunSpec
    *sections, last = path.split(".")
    for name in sections:
        inner = model.model_fields[name].annotation
        assert isinstance(inner, type)
        model = inner
    return model.model_fields[last]


@dataclass(frozen=True, slots=True)
class Offer:
    """What the connected workers have for a run, by kind; without entries that no run can use."""

    actors: tuple[CatalogueEntry, ...]
    rewards: tuple[CatalogueEntry, ...]
    prompts: tuple[CatalogueEntry, ...]
    rules: tuple[str, ...]


def offer(catalogue: list[CatalogueEntry]) -> Offer:
    """The usable entries of a catalogue."""
    usable = [entry for entry in catalogue if not entry.problem]
    models = [entry for entry in usable if entry.kind == "model"]
    return Offer(
        actors=tuple(m for m in models if m.task == "causal_lm"),
        rewards=tuple(m for m in models if m.task == "sequence_classification"),
        prompts=tuple(entry for entry in usable if entry.kind == "prompts"),
        rules=tuple(entry.id for entry in usable if entry.kind == "rule"),
    )


@dataclass(frozen=True, slots=True)
class ExampleRun:
    """An example preset with its spec as plain data, and what it needs: ids, and whether a connected worker has each."""

    preset: Preset
    spec: dict[str, Any]
    needs: tuple[tuple[str, bool], ...]

    @property
    def ready(self) -> bool:
        """Whether a connected worker has all of them."""
        return all(present for _, present in self.needs)


def example_runs(catalogue: list[CatalogueEntry]) -> list[ExampleRun]:
    """The examples. An entry with a problem counts as absent."""
    usable = {entry.id for entry in catalogue if not entry.problem}
    return [
        ExampleRun(
            preset,
            _example_spec(preset.example).model_dump(mode="json"),
            tuple((id, id in usable) for id in preset.needs),
        )
        for preset in EXAMPLES
    ]


@cache
def _example_spec(name: str) -> RunSpec:
    return load_yaml(example_text(name))


def starting_spec(catalogue: list[CatalogueEntry]) -> dict[str, Any]:
    """A first spec as plain data: defaults, and matching models and prompts of the catalogue.

    An example's spec if the catalogue has no actor, or no reward model but all that the example needs.
    """
    offered = offer(catalogue)
    actor = next(iter(offered.actors), None)
    reward = _reward_for(actor, offered)
    first = next((e for e in example_runs(catalogue) if actor is None or (reward is None and e.ready)), None)
    if first is not None:
        return first.spec
    prompts = max(offered.prompts, key=lambda entry: entry.rows, default=None)
    rule = None if reward else _rule_among(offered.rules)
    oppo = next(preset for preset in PRESETS if preset.key == "oppo")
    # Δ is left empty, so that its defaults follow the batch size.
    overlap = {**Overlap().model_dump(mode="json", exclude={"overcommit": {"initial", "max"}}), **oppo.overlap}
    return {
        "version": SPEC_VERSION,
        "name": f"{actor.id.rsplit('/', 1)[-1]} {oppo.key}" if actor else oppo.key,
        "seed": 0,
        "steps": FIRST_STEPS,
        "models": {
            "actor": {"path": actor.id if actor else ""},
            "reward": {"rule": rule} if rule else {"model": {"path": reward.id if reward else ""}},
            "critic": "reward" if reward else "actor",
        },
        "data": {"prompts": prompts.id if prompts else ""},
        "ppo": Ppo().model_dump(mode="json"),
        "rollout": _rollout_within(actor.context if actor else 0),
        "overlap": overlap,
        "resources": Resources().model_dump(mode="json"),
        "queue": Queue().model_dump(mode="json"),
        "budget": Budget().model_dump(mode="json"),
        "checkpoints": Checkpoints().model_dump(mode="json"),
        "logging": Logging().model_dump(mode="json"),
    }


def _reward_for(actor: CatalogueEntry | None, offered: Offer) -> CatalogueEntry | None:
    same = [model for model in offered.rewards if actor and model.tokenizer_digest == actor.tokenizer_digest]
    return next(iter(same or offered.rewards), None)


def _rule_among(rules: tuple[str, ...]) -> str | None:
    """A rule of the user's own, or the built-in one that scores any text; the others fit their examples only."""
    return next((rule for rule in rules if rule not in BUILT_IN_RULES), GENERAL_RULE if GENERAL_RULE in rules else None)


def _rollout_within(context: int) -> dict[str, Any]:
    """The default lengths, reduced to the context of a small model."""
    rollout = Rollout()
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if context and context < longest:
        prompt = min(rollout.max_prompt_tokens, context // 4)
        rollout = Rollout(max_prompt_tokens=max(1, prompt), max_new_tokens=max(1, context - prompt))
    return rollout.model_dump(mode="json")
