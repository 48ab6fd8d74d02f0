"""The generated pages are what the code says, and the code says something about everything that they list."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import click
import pytest

from oppo_cli.main import EXIT_STATUSES, FAILED, REFUSED
from oppo_contract import states
from oppo_contract.fields import SpecSchema
from oppo_contract.spec import RunSpec
from oppo_contract.states import RunState
from oppo_contract.wire import Outcome
from oppo_platform.accounts.access import CAP, RANK
from oppo_platform.accounts.models import Role, Scope
from oppo_platform.runs.attempts import fence
from oppo_platform.runs.models import AttemptState
from oppo_platform.runs.state_help import ATTEMPT_STATES, OUTCOMES
from scripts import reference
from scripts.reference import api, commands, events
from tests.web.matrix.operations import OPERATIONS
from tests.web.matrix.rows import Row


@pytest.mark.parametrize("path", reference.PAGES)
def test_a_page_is_as_the_code_has_it(path: str) -> None:
    assert (reference.ROOT / path).read_text(encoding="utf-8") == reference.generate(path), "run `make docs`"


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
    notes = SpecSchema(RunSpec.model_json_schema()).field_docs()
    assert [note.path for note in notes if not note.description] == []


def test_every_state_and_outcome_has_a_meaning() -> None:
    assert set(states.STATE_DESCRIPTIONS) == set(RunState)
    assert set(ATTEMPT_STATES) == set(AttemptState)
    told = get_args(get_type_hints(Outcome)["outcome"])
    given_up = get_args(get_type_hints(fence)["outcome"])
    assert set(OUTCOMES) == {*told, *given_up, "unclaimed"}


@pytest.mark.parametrize(("method", "path", "told"), [pytest.param(*call, id=call[2]["operationId"]) for call in api.calls()])
def test_every_call_and_parameter_says_what_it_is(method: str, path: str, told: dict[str, Any]) -> None:
    assert told["summary"]
    assert next(iter(told["responses"].values()))["description"]
    assert [each["name"] for each in told.get("parameters", []) if not each.get("description")] == []
    assert [name for name, _, _, _, meaning in api.body_fields(told) if not meaning] == []


@pytest.mark.parametrize("row", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_a_call_s_scope_is_the_least_that_acts_as_its_role(row: Row) -> None:
    scopes = list(Scope)
    told = scopes.index(Scope(api.minimum_scope(row)))
    enough = [at for at, scope in enumerate(scopes) if row.least not in RANK or RANK[CAP[scope]] >= RANK[Role(row.least)]]
    assert told >= min(enough)
    assert told == min(enough) or row.writes or row.admin
