"""Refuses at submit runs that could never start."""

from __future__ import annotations

from typing import Any

from oppo_contract.spec_errors import SpecProblem
from oppo_platform import clock
from oppo_platform.scheduling import policy
from oppo_platform.scheduling.build_snapshot import empty_cluster, exact_nodes, required_items

# The field to change, by the policy's code; other codes concern the spec as a whole.
FIELDS = {"quota_never": "resources.devices", "too_large": "resources.devices", "kind": "resources.kind"}


def infeasible_request(team_id: int, devices: int, needs: dict[str, Any]) -> list[SpecProblem]:
    """Why a run of the team could not start even on an empty cluster, within the team's quota; empty if it could.

    Args:
        team_id: the team whose quota counts.
        devices: number of requested devices.
        needs: as `Run.needs`.
    """
    run = policy.WaitingRun(
        run_id=0, team_id=team_id, devices=devices, nodes=exact_nodes(needs), kind=needs["kind"], needs=required_items(needs)
    )
    reason = policy.feasible_ever(run, empty_cluster(clock.now()))
    if reason is None:
        return []
    field = FIELDS.get(reason.code, "")
    value = str(devices) if field == "resources.devices" else None
    return [SpecProblem(field, f"can never be met: {_inside(reason.text)}", value, _inside(reason.sooner))]


def _inside(sentence: str) -> str:
    """A sentence as part of another one."""
    return sentence[:1].lower() + sentence[1:].rstrip(".")
