"""Requests that schemathesis makes up from the API's own description, one by one and in chains, with a token of each scope.

Most of the single ones ask about what is there; some fit the description, others are wrong on purpose. No request is a server
error, and no reply is one that the description does not have. Quick here; `-m full` makes many more, in about four minutes.
"""

import contextlib
import os

import pytest
import schemathesis
from django.core.wsgi import get_wsgi_application
from hypothesis import HealthCheck, Phase, given, seed, strategies
from hypothesis import settings as hypothesis_settings
from hypothesis.errors import Flaky
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from oppo_platform.accounts.api_tokens import create_api_token
from oppo_platform.api import log_long_poll, logs

SCOPES = ["read", "submit", "admin"]
# For every parameter of a path: names in the scene.
IDS = {
    "run_id": ["run", "paused", "held", "waiting", "limited", "ended", "deleted"],
    "checkpoint_id": ["checkpoint", "its_checkpoint"],
    "sample_id": ["sample"],
    "alert_id": ["alert"],
    "team_id": ["team"],
    "project_id": ["project"],
    "webhook_id": ["webhook", "gone_webhook"],
    "view_id": ["view", "gone_view"],
    "token_id": ["token"],
}
# Whether what was made up had to be accepted or refused is nobody's to say: 409 is what most states answer.
CHECKS = [
    not_a_server_error, checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance,
    checks.response_headers_conformance,
]  # fmt: skip
QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
FIRST_SEED = int(os.environ.get("OPPO_TEST_SEED") or 0)
CHAINED = hypothesis_settings(max_examples=4, stateful_step_count=8, phases=[Phase.generate], **QUIET)


@pytest.fixture(autouse=True)
def nobody_waits_long(monkeypatch):
    """For a line that nobody writes."""

    def shortly(request, run_id, told, within_s, read):
        return log_long_poll.when_there_is_more(request, run_id, told, min(within_s, 0.05), read)

    monkeypatch.setattr(logs, "when_there_is_more", shortly)


def fuzzed(world, scope, settings):
    """The description as somebody with this token finds it, and the header that they send."""
    settings.OPPO_API_RATE = 0
    token = create_api_token(world.people["ada"], world.team, "fuzz", scope=scope).text
    headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
    return schemathesis.openapi.from_wsgi("/api/v1/openapi.json", get_wsgi_application(), headers=headers), headers


def ids_in(operation, scene):
    """Ids for the operation's path, of things of the scene."""
    names = [parameter.name for parameter in operation.path_parameters]
    return strategies.fixed_dictionaries({name: strategies.sampled_from([scene[one] for one in IDS[name]]) for name in names})


def requests_of(operation, scene, mode):
    """Requests about what is there, and as many with ids that are made up as well."""
    made_up = operation.as_strategy(mode)
    if not operation.path_parameters:
        return made_up
    return ids_in(operation, scene).flatmap(lambda ids: operation.as_strategy(mode, path_parameters=ids)) | made_up


def each_alone(world, scene, scope, conf, examples, mode=GenerationMode.POSITIVE):
    schema, headers = fuzzed(world, scope, conf)
    seen = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @hypothesis_settings(max_examples=examples, **QUIET)
        @given(case=requests_of(operation, scene, mode))
        def one(case):
            case.call_and_validate(checks=CHECKS, headers=headers)

        one()
        seen += 1
    assert seen > 50


@pytest.mark.parametrize("scope", SCOPES)
def test_single_requests(world, scene, scope, settings):
    each_alone(world, scene, scope, settings, 3)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
@pytest.mark.parametrize("scope", SCOPES)
def test_many_single_requests(world, scene, scope, mode, settings):
    each_alone(world, scene, scope, settings, 20, mode)


def chains(world, scope, conf, runs):
    schema, headers = fuzzed(world, scope, conf)
    wrong = []

    class Chain(schema.as_state_machine()):
        """Requests one after the other, with ids that earlier replies named."""

        def get_call_kwargs(self, case):
            return {"headers": headers}

        def validate_response(self, response, case, additional_checks=(), **kwargs):
            # Kept and not raised: Hypothesis would try the chain again, find another answer where it has left something behind,
            # and take the fault for a whim.
            try:
                case.validate_response(response, checks=CHECKS)
            except FailureGroup as fault:
                wrong.append(str(fault))

    for number in range(runs):
        # What one chain has done is there for the next one: that draws then differ is no fault.
        with contextlib.suppress(Flaky):
            seed(FIRST_SEED + number)(Chain).run(settings=CHAINED)
    assert not wrong, "\n\n".join(wrong[:5])


@pytest.mark.parametrize("scope", SCOPES)
def test_chains_of_requests(world, scene, scope, settings):
    chains(world, scope, settings, 3)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scope", SCOPES)
def test_many_chains_of_requests(world, scene, scope, settings):
    chains(world, scope, settings, 30)
