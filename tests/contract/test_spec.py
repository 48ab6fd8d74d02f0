"""A spec survives YAML and JSON unchanged, and every field has a description."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from oppo_contract import RunSpec, load_spec
from oppo_contract.aliases import SUGGESTED
from oppo_contract.fields import SpecSchema
from oppo_contract.presets import EXAMPLES, PRESETS, Preset, example_text
from oppo_contract.spec_errors import SpecError
from oppo_contract.yaml_text import dump_yaml, load_yaml, parse_yaml
from tests.contract.conftest import SMALLEST
from tests.contract.strategies import valid_specs

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@given(valid_specs())
@settings(deadline=None)
def test_a_spec_survives_yaml(data: dict[str, Any]) -> None:
    spec = load_spec(data)
    assert load_yaml(dump_yaml(spec.model_dump(mode="json"))) == spec
    assert load_yaml(dump_yaml(data)) == spec


@given(valid_specs())
@settings(deadline=None)
def test_a_spec_survives_json(data: dict[str, Any]) -> None:
    spec = load_spec(data)
    assert load_spec(json.loads(spec.model_dump_json())) == spec
    # JSON is YAML, so one reader takes both.
    assert load_yaml(spec.model_dump_json()) == spec


@given(PLAIN)
@settings(deadline=None)
def test_any_plain_data_survives_yaml(data: Any) -> None:
    assert parse_yaml(dump_yaml(data)) == data


def test_every_field_is_described() -> None:
    field_docs = list(SpecSchema(RunSpec.model_json_schema()).field_docs())
    assert len(field_docs) > 60
    assert [note.path for note in field_docs if len(note.description) < 10 or not note.description.endswith(".")] == []
    assert [note.path for note in field_docs if not note.allowed] == []


def test_yaml_is_written_to_be_read(minimal: dict[str, Any]) -> None:
    text = dump_yaml(load_spec(minimal).model_dump(mode="json"))
    sections = [line.partition(":")[0] for line in text.splitlines() if not line.startswith(" ")]
    assert sections == list(RunSpec.model_fields)
    assert "{" not in text
    assert dump_yaml({"a": "off", "b": 1e-5, "c": ["x\x85y"]}) == 'a: off\nb: 1e-05\nc:\n- "x\\Ny"\n'


UNITS = {
    "rollout.max_new_tokens": "tokens",
    "rollout.max_prompt_tokens": "tokens",
    "ppo.micro_batch_tokens": "tokens",
    "ppo.batch_size": "prompts",
    "ppo.kl.target": "nats",
    "ppo.kl.horizon": "sequences",
    "overlap.overcommit.max": "rollouts",
    "overlap.chunk.size": "tokens",
    "overlap.max_age": "steps",
    "budget.max_hours": "hours",
    "checkpoints.every_steps": "steps",
}


@pytest.mark.parametrize(("path", "unit"), UNITS.items())
def test_a_measured_number_names_its_unit(path: str, unit: str) -> None:
    descriptions = {note.path: note.description for note in SpecSchema(RunSpec.model_json_schema()).field_docs()}
    assert unit in descriptions[path].lower()


def test_the_two_preset_overlaps_are_valid_and_differ(minimal: dict[str, Any]) -> None:
    sequential, oppo, _ = (load_spec({**minimal, "overlap": preset.overlap}) for preset in PRESETS)
    assert sequential.initial_overcommit == 0
    assert oppo.initial_overcommit > 0
    assert sequential.overlap.intra_step == "off"
    assert oppo.overlap.intra_step == "per_chunk"


@pytest.mark.parametrize(
    "critic_settings", [{}, {"ppo.critic_learning_rate": 1e-4, "ppo.gae_lambda": 1.0, "models.critic": "reward"}]
)
def test_the_preset_grpo_trains_groups_without_a_critic(minimal: dict[str, Any], critic_settings: dict[str, Any]) -> None:
    grpo = next(preset for preset in PRESETS if preset.key == "grpo")
    data = {**minimal, "overlap": grpo.overlap}
    for path, value in {**critic_settings, **grpo.settings}.items():
        *sections, name = path.split(".")
        at = data
        for section in sections:
            at[section] = at = dict(at.get(section, {}))
        at[name] = value
        if value is None:  # the default
            del at[name]
    spec = load_spec(data)
    assert (spec.ppo.algorithm, spec.ppo.rows, spec.ppo.has_critic) == ("grpo", 8 * spec.ppo.batch_size, False)
    assert (spec.ppo.kl.placement, spec.ppo.kl.estimator) == ("loss", "k3+")


def test_every_preset_says_when_to_take_it_in_one_line() -> None:
    for preset in (*PRESETS, *EXAMPLES):
        assert preset.description.startswith(("For ", "When ", "The baseline")), "when to take it, then what it does"
        assert len(preset.description) <= 125
        assert "\n" not in preset.description


@pytest.mark.parametrize("preset", EXAMPLES, ids=lambda preset: preset.key)
def test_an_example_preset_has_the_overlap_of_its_spec_and_a_command_that_exists(preset: Preset) -> None:
    from oppo_cli.examples import EXAMPLES as MADE

    spec = load_yaml(example_text(preset.example))
    assert (spec.overlap.intra_step, spec.overlap.inter_step) == (preset.overlap["intra_step"], preset.overlap["inter_step"])
    assert spec.models.actor.path is not None
    assert spec.evaluation is not None
    assert preset.needs == (spec.models.actor.path, spec.data.prompts, spec.evaluation.prompts)
    assert preset.needs[0].startswith(f"{MADE[preset.command.removeprefix('oppo example ')].folder}/")


def test_a_spec_cannot_be_changed_after_the_check(minimal: dict[str, Any]) -> None:
    spec = load_spec(minimal)
    with pytest.raises(ValidationError):
        spec.steps = 2  # type: ignore[misc]
    assert spec.steps == 1


@given(batch=st.integers(1, 200), given_settings=st.dictionaries(st.sampled_from(["min", "initial", "max"]), st.integers(0, 200)))
@settings(deadline=None)
def test_defaults_of_overcommit_follow_what_is_given(batch: int, given_settings: dict[str, int]) -> None:
    data = {**SMALLEST, "ppo": {"batch_size": batch}, "overlap": {"overcommit": given_settings}}
    least, most = given_settings.get("min", 0), given_settings.get("max", min(batch, max(8, given_settings.get("min", 0))))
    possible = least <= given_settings.get("initial", least) <= most and least <= most <= batch
    if not possible:
        with pytest.raises(SpecError):
            load_spec(data)
        return
    bounds = load_spec(data).overlap.overcommit
    assert bounds.min <= bounds.initial <= bounds.max <= batch
    assert {name: getattr(bounds, name) for name in given_settings} == given_settings
    assert load_spec(data).model_dump()["overlap"]["overcommit"]["max"] == most


def test_defaults_of_overcommit_follow_a_maximum_also_without_deferral() -> None:
    data = {**SMALLEST, "overlap": {"inter_step": "off", "overcommit": {"max": 2}}}
    bounds = load_spec(data).overlap.overcommit
    assert (bounds.min, bounds.initial, bounds.max) == (0, 2, 2)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("llama3/8b lr=1e-5 β", True), ("größe #3: a+b", True), ("🚀 run", True), ("x", True), ("x" * 120, True),
        (" a", False), ("a ", False), ("a\nb", False), ("a\u202eb", False), ("\x00", False), ("", False), ("x" * 121, False),
    ],
)  # fmt: skip
def test_a_name_is_any_line_of_text(name: str, allowed: bool) -> None:
    if allowed:
        assert load_spec({**SMALLEST, "name": name}).name == name
    else:
        with pytest.raises(SpecError):
            load_spec({**SMALLEST, "name": name})


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("lr", "ppo.learning_rate"), ("ppo.lr", "ppo.learning_rate"), ("bs", "ppo.batch_size"),
        ("ppo.kl_coef", "ppo.kl.coefficient"), ("rollout.max_length", "rollout.max_new_tokens"),
        ("ppo.learning_rat", "learning_rate"), ("generate_max_len", "rollout.max_new_tokens"),
        ("train_batch_size", "ppo.batch_size"), ("ppo.actor_learning_rate", "ppo.learning_rate"),
    ],
)  # fmt: skip
def test_names_of_other_frameworks_are_suggested(path: str, suggestion: str) -> None:
    section, _, key = path.rpartition(".")
    with pytest.raises(SpecError) as refused:
        load_spec(SMALLEST | ({section: {key: 1}} if section else {key: 1}))
    [problem] = refused.value.problems
    assert (problem.path, problem.suggestion) == (path, suggestion)


def test_every_suggestion_is_a_setting() -> None:
    paths = {note.path for note in SpecSchema(RunSpec.model_json_schema()).field_docs()}
    assert {path for path in SUGGESTED.values() if path not in paths} <= {"models.critic.path"}
