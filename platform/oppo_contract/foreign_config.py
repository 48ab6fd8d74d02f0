"""Converts a configuration of TRL (PPOConfig, GRPOConfig arguments) or verl (ppo_trainer) into a spec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from oppo_contract.aliases import ACTOR, KL_ESTIMATORS, NOT_TAKEN, TRL, VERL, Alias
from oppo_contract.spec import load_spec
from oppo_contract.spec_errors import SpecError, SpecProblem
from oppo_contract.yaml_text import parse_yaml

VERL_SECTIONS = ("actor_rollout_ref", "algorithm", "critic", "data", "reward_model", "trainer")
GRPO_NAMES = ("num_generations", "max_completion_length", "beta", "epsilon", "loss_type")
# A spec needs these; the user replaces them.
PLACEHOLDERS = {
    "name": "imported", "steps": 100, "models.actor.path": "MODEL", "data.prompts": "PROMPTS.jsonl",
    "models.reward.rule": "letters:score",
}  # fmt: skip
REWARD = "models.reward."
UNKNOWN = "no setting means the same"
COMBINED = {
    "trl": {"per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "batch_size"},
    "verl": {
        f"{ACTOR}ppo_mini_batch_size", f"{ACTOR}use_kl_loss", f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type",
        "algorithm.use_kl_in_reward", "trainer.n_gpus_per_node", "reward_model.enable",
    },
}  # fmt: skip


@dataclass(slots=True)
class Converted:
    """A valid spec by dotted path, the names that were not taken over with reasons, and the paths that are placeholders."""

    settings: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    placeholders: list[str] = field(default_factory=list)

    def tree(self) -> dict[str, Any]:
        """The settings as nested data."""
        tree: dict[str, Any] = {}
        for path, value in self.settings.items():
            *sections, key = path.split(".")
            at = tree
            for section in sections:
                at = at.setdefault(section, {})
            at[key] = value
        return tree


def convert(text: str, answers: Mapping[str, Any]) -> Converted:
    """Convert YAML, JSON, or the options of a command line. `answers`: settings of ours by dotted path, which take precedence.

    Raises:
        SpecError: the text is unreadable, or no setting in it is known.
    """
    given = dict(_flatten(_read(text)))
    kind = "verl" if any(name.split(".")[0] in VERL_SECTIONS and "." in name for name in given) else "trl"
    table, result = (VERL, Converted()) if kind == "verl" else (TRL, Converted())
    for name, value in given.items():
        if name not in COMBINED[kind]:
            _take(result, name, value, table.get(name))
    (_combine_verl if kind == "verl" else _combine_trl)(given, result.settings)
    if not result.settings:
        raise SpecError([SpecProblem("", "has no setting of TRL's PPOConfig or GRPOConfig, or of verl's ppo_trainer")])
    if any(path.startswith(REWARD) for path in answers):
        result.settings = {path: value for path, value in result.settings.items() if not path.startswith(REWARD)}
    result.settings |= answers
    _fill(result)
    _make_valid(result, {alias.path: name for name, alias in table.items() if name in given})
    return result


def _read(text: str) -> Any:
    data = parse_yaml(text)
    words = data.split() if isinstance(data, str) else data if isinstance(data, list) else None
    if words is None:
        return data
    return _options(list(map(str, words)))


def _options(words: list[str]) -> dict[str, Any]:
    """The options of a command line: `name=value`, `--name=value`, `--name value`, and `--name` for true."""
    options, last = dict[str, Any](), ""
    for word in words:
        name, sign, value = word.lstrip("+-").partition("=")
        if sign or word.startswith("--"):
            options[name], last = parse_yaml(value) if sign else True, "" if sign else name
        elif last:
            options[last], last = parse_yaml(word), ""
    return options


def _flatten(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every value that is set."""
    for key, value in data.items() if isinstance(data, dict) else ():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        elif value is not None and value != "???" and key != "_target_":
            yield name, value


def _take(result: Converted, name: str, value: Any, alias: Alias | None) -> None:
    if alias is None:
        result.left_out[name] = NOT_TAKEN.get(name, UNKNOWN)
    elif isinstance(value, str) and "${" in value:
        result.left_out[name] = f"refers to another setting; set {alias.path}"
    elif alias.values is None or (alias.others and value not in alias.values):
        result.settings[alias.path] = value
    elif isinstance(value, list) or value not in alias.values:
        result.left_out[name] = f"{value} has no equivalent in {alias.path}"
    elif alias.values[value] is not None:
        result.settings[alias.path] = alias.values[value]


def _combine_trl(given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Settings that several of TRL's determine: the algorithm, B, and where the KL term is."""
    grpo = any(name in given for name in GRPO_NAMES)
    factors = [given.get(name, 1) for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")]
    counted = "per_device_train_batch_size" in given and all(type(factor) is int for factor in factors)
    responses = given.get("batch_size", prod(factors) if counted else None)
    if grpo:
        settings["ppo.algorithm"] = "grpo"
        settings.setdefault("ppo.group_size", 8)
        settings.setdefault("ppo.kl.coefficient", 0.0)
        if settings["ppo.kl.coefficient"]:
            settings |= {"ppo.kl.placement": "loss", "ppo.kl.estimator": "k3"}
    if isinstance(responses, int):
        group = settings.get("ppo.group_size", 1)
        settings["ppo.batch_size"] = max(1, responses // group) if isinstance(group, int) and group > 0 else responses


def _combine_verl(given: dict[str, Any], settings: dict[str, Any]) -> None:
    """Settings that several of verl's determine: mini-batches, devices, and where the KL term is."""
    batch, mini = settings.get("ppo.batch_size"), given.get(f"{ACTOR}ppo_mini_batch_size")
    if isinstance(batch, int) and isinstance(mini, int) and mini and batch % mini == 0:
        settings["ppo.mini_batches"] = batch // mini
    if given.get("reward_model.enable") is False:
        settings.pop("models.reward.model.path", None)
    if "evaluation.prompts" not in settings:
        settings.pop("evaluation.every_steps", None)
    elif "data.prompt_field" in settings:
        settings["evaluation.prompt_field"] = settings["data.prompt_field"]
    if isinstance(gpus := given.get("trainer.n_gpus_per_node"), int):
        settings["resources.devices"] = gpus * settings.get("resources.nodes", 1)
    if given.get(f"{ACTOR}use_kl_loss") is True:
        estimator = KL_ESTIMATORS.get(given.get(f"{ACTOR}kl_loss_type", "low_var_kl"), "k3")
        settings |= {
            "ppo.kl.placement": "loss",
            "ppo.kl.coefficient": given.get(f"{ACTOR}kl_loss_coef", 0.001),
            "ppo.kl.estimator": estimator if estimator != "k1" else "k3",
        }
    elif given.get("algorithm.use_kl_in_reward") is not True:
        for path in [path for path in settings if path.startswith("ppo.kl.")]:
            del settings[path]
        settings["ppo.kl.coefficient"] = 0.0


def _fill(result: Converted) -> None:
    """Placeholders for what a spec needs and theirs does not have."""
    has_reward = any(path.startswith("models.reward.") for path in result.settings)
    for path, value in PLACEHOLDERS.items():
        if path not in result.settings and not (path == "models.reward.rule" and has_reward):
            result.settings[path] = value
            result.placeholders.append(path)


def _make_valid(result: Converted, names: dict[str, str]) -> None:
    """Leave out settings that a spec refuses, with the reason. Raises `SpecError` for the others."""
    while True:
        try:
            load_spec(result.tree())
            return
        except SpecError as error:
            refused = [(path, problem) for problem in error.problems for path in _causes(problem.path, result.settings)]
            if not refused:
                raise
            for path, problem in refused:
                result.settings.pop(path, None)
                result.left_out[names.get(path, path)] = f"{problem.path} {problem.message}"
            _fill(result)


def _causes(refused: str, settings: dict[str, Any]) -> list[str]:
    """The settings to leave out: a batch that is too small for the devices stays, and the devices go."""
    devices = [path for path in settings if path.startswith("resources.")]
    if refused == "ppo.batch_size" and devices:
        return devices
    return [path for path in settings if refused and (path == refused or path.startswith(f"{refused}."))]
