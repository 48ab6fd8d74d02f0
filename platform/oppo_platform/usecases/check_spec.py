"""Checks a spec before it is submitted (`runs.services.submit_run`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from django.conf import settings

from oppo_contract.chosen_defaults import Chosen, chosen_defaults
from oppo_contract.spec import RunSpec, load_spec
from oppo_contract.spec_errors import SpecError, SpecProblem
from oppo_contract.yaml_text import check_size, load_yaml
from oppo_estimate.shapes import tiny_shape
from oppo_platform.accounts.team_secrets import secret_names
from oppo_platform.runs.forks import fork_problems
from oppo_platform.runs.preflight import NodeOffer, find_problems, secret_problems
from oppo_platform.runs.services import node_offers, node_requirements
from oppo_platform.scheduling import policy
from oppo_platform.scheduling.predicted_start import Present, read_present, waiting_run
from oppo_platform.storage.quotas import storage_problems

# The setting to change, by the policy's reason code; other codes concern the spec as a whole.
FIELDS = {"quota_never": "resources.devices", "too_large": "resources.devices", "kind": "resources.kind"}


class ClusterView:
    """The cluster as one request sees it: what its checks and its plan need is read once, and only if they need it."""

    @cached_property
    def offers(self) -> list[NodeOffer]:
        """Resources of the connected nodes."""
        return node_offers()

    @cached_property
    def present(self) -> Present:
        """What the scheduler sees."""
        return read_present()


def check_spec(
    yaml: str | None = None, data: Any = None, team_id: int | None = None, cluster: ClusterView | None = None
) -> RunSpec:
    """The spec, checked by itself, against the connected workers' capabilities, and against the team's quotas and secrets.

    Args:
        yaml: the spec as text, or
        data: as plain data.
        team_id: the team; None: its quotas and secrets are not checked, because the user may not see them.
        cluster: default: as it is now.

    Raises:
        SpecError: with every problem.
    """
    if yaml is None:
        check_size(data)
    spec = load_yaml(yaml) if yaml is not None else load_spec(data)
    cluster = cluster or ClusterView()
    problems = find_problems(spec, cluster.offers, shared=settings.OPPO_ARTIFACTS_SHARED)
    if team_id is not None:
        problems = problems or _infeasible_request(spec, cluster, team_id)
        problems += secret_problems(spec, secret_names(team_id)) + storage_problems(team_id)
        problems += fork_problems(spec, team_id)
    if problems:
        raise SpecError(problems)
    return spec


def chosen_values(spec: RunSpec, offers: Sequence[NodeOffer]) -> dict[str, Chosen]:
    """What a run will use for settings that the spec leaves empty, as far as the nodes in `offers` know its models.

    Nothing for a fork, which keeps what its checkpoint's run used.
    """
    if spec.fork is not None:
        return {}
    known = {name: facts.weights for offer in offers for name, facts in offer.models.items()}
    weights = {
        role: tiny_shape(model.tiny, "lm").weights if model.tiny is not None else known.get(model.path or "", 0)
        for role, model in spec.role_models().items()
    }
    return chosen_defaults(spec, weights)


def _infeasible_request(spec: RunSpec, cluster: ClusterView, team_id: int) -> list[SpecProblem]:
    """Why the run could not start even on an empty cluster within the team's quota; empty if it could."""
    devices = spec.resources.devices
    run = waiting_run(spec, node_requirements(spec, cluster.offers), team_id)
    reason = policy.feasible_ever(run, cluster.present.snapshot)
    if reason is None:
        return []
    field = FIELDS.get(reason.code, "")
    text, hint = (sentence[:1].lower() + sentence[1:].rstrip(".") for sentence in (reason.text, reason.sooner))
    return [SpecProblem(field, f"can never be met: {text}", str(devices) if field == "resources.devices" else None, hint)]
