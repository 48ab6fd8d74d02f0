"""The generated pages are what the code says, and the code says something about everything that they list."""

from __future__ import annotations

from typing import get_args, get_type_hints

import click
import pytest

from oppo_cli.main import EXIT_STATUSES, FAILED, REFUSED
from oppo_contract.fields import SpecSchema
from oppo_contract.spec import RunSpec
from oppo_contract.states import MEANINGS, RunState
from oppo_contract.wire import Outcome
from oppo_platform.runs.attempts import fence
from oppo_platform.runs.meanings import ATTEMPT_STATES, OUTCOMES
from oppo_platform.runs.models import AttemptState
from scripts import reference
from scripts.reference import commands, events


@pytest.mark.parametrize("path", reference.PAGES)
def test_a_page_is_as_the_code_has_it(path: str) -> None:
    assert (reference.ROOT / path).read_text(encoding="utf-8") == reference.text_of(path), "run `make docs`"


@pytest.mark.parametrize(("path", "command"), list(commands.commands()))
def test_every_command_and_option_says_what_it_is(path: str, command: click.Command) -> None:
    assert command.help, path
    assert [option.opts for option in commands.options(command) if not option.help] == []


def test_every_exit_status_is_explained() -> None:
    assert set(EXIT_STATUSES) == {0, FAILED, REFUSED}


@pytest.mark.parametrize("model", [events.contract.Envelope, *events.models(), *events.PARTS.values()])
def test_every_event_and_field_says_what_it_is(model: type) -> None:
    assert model.__doc__
    assert [name for name, _, meaning in events.fields(model) if not meaning and name != "kind"] == []


def test_every_setting_says_what_it_is() -> None:
    notes = SpecSchema(RunSpec.model_json_schema()).notes()
    assert [note.path for note in notes if not note.description] == []


def test_every_state_and_outcome_has_a_meaning() -> None:
    assert set(MEANINGS) == set(RunState)
    assert set(ATTEMPT_STATES) == set(AttemptState)
    told = get_args(get_type_hints(Outcome)["outcome"])
    given_up = get_args(get_type_hints(fence)["outcome"])
    assert set(OUTCOMES) == {*told, *given_up, "unclaimed"}
