"""Checks a spec before it is submitted (`runs.services.submit_run`)."""

from __future__ import annotations

from typing import Any

from django.conf import settings

from oppo_contract.spec import RunSpec, load_spec
from oppo_contract.spec_errors import SpecError
from oppo_contract.yaml_text import check_size, load_yaml
from oppo_platform.accounts.team_secrets import secret_names_of
from oppo_platform.runs.forks import fork_problems
from oppo_platform.runs.preflight import find_problems, secret_problems
from oppo_platform.runs.services import node_offers, node_requirements
from oppo_platform.scheduling.admission import infeasible_request
from oppo_platform.storage.quotas import storage_problems


def check_spec(yaml: str | None = None, data: Any = None, team_id: int | None = None) -> RunSpec:
    """The spec, checked by itself, against the connected workers' capabilities, and against the team's quotas and secrets.

    Args:
        yaml: the spec as text, or
        data: as plain data.
        team_id: the team; None: its quotas and secrets are not checked, because the user may not see them.

    Raises:
        SpecError: with every problem.
    """
    if yaml is None:
        check_size(data)
    spec = load_yaml(yaml) if yaml is not None else load_spec(data)
    problems = find_problems(spec, node_offers(), shared=settings.OPPO_ARTIFACTS_SHARED)
    if team_id is not None:
        problems = problems or infeasible_request(team_id, spec.resources.devices, node_requirements(spec))
        problems += secret_problems(spec, secret_names_of(team_id)) + storage_problems(team_id)
        problems += fork_problems(spec, team_id)
    if problems:
        raise SpecError(problems)
    return spec
