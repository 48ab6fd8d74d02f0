"""A spec survives YAML and JSON unchanged, and every field has a description."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from oppo_contract import RunSpec, load_spec
from oppo_contract.fields import SpecSchema
from oppo_contract.presets import EXAMPLES, PRESETS, Preset, example_text
from oppo_contract.yaml_text import dump_yaml, load_yaml, parse_yaml
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
    sequential, oppo = (load_spec({**minimal, "overlap": preset.overlap}) for preset in PRESETS)
    assert sequential.initial_overcommit == 0
    assert oppo.initial_overcommit > 0
    assert sequential.overlap.intra_step == "off"
    assert oppo.overlap.intra_step == "per_chunk"


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
