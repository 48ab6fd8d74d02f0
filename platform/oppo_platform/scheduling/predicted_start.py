"""When a run that is not submitted yet would start: the scheduler's plan with the run at the end of the queue. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

from django.conf import settings

from oppo_contract.spec import RunSpec
from oppo_platform import clock
from oppo_platform.runs.forks import fork_source
from oppo_platform.scheduling import policy
from oppo_platform.scheduling.build_snapshot import build_snapshot
from oppo_platform.scheduling.waiting_runs import WaitingRuns, parse_needs

NEW_RUN = 0  # no run has this id
# A plan of more waiting runs takes longer than a page waits for its check.
MOST_WAITING = 2000


@dataclass(frozen=True, slots=True)
class PredictedStart:
    """The expected start, None if it cannot be known, with the reason for waiting and what would start it sooner."""

    at: datetime | None
    text: str
    sooner: str = ""


def waiting_run(spec: RunSpec, needs: dict[str, Any], team_id: int, submitted_at: float = 0.0) -> policy.WaitingRun:
    """The spec as a waiting run of the policy. `needs`: of `runs.services.node_requirements`."""
    kind, nodes, required = parse_needs(needs)
    limit_h = spec.queue.max_runtime_hours
    return policy.WaitingRun(
        run_id=NEW_RUN,
        team_id=team_id,
        devices=spec.resources.devices,
        priority=spec.queue.priority,
        nodes=nodes,
        kind=kind,
        needs=required,
        submitted_at=submitted_at,
        preemptible=spec.queue.preemptible,
        max_runtime_s=None if limit_h is None else 3600 * limit_h,
    )


@dataclass(frozen=True, slots=True)
class Present:
    """The scheduler's snapshot at an instant."""

    at: datetime
    snapshot: policy.Snapshot


def read_present() -> Present:
    """The present snapshot."""
    now = clock.now()
    return Present(now, build_snapshot(now, _kept()))


def predict_start(spec: RunSpec, needs: dict[str, Any], team_id: int, present: Present) -> PredictedStart:
    """When the run would start if it were submitted now."""
    now, snapshot = present.at, present.snapshot
    if len(snapshot.waiting) > MOST_WAITING:
        return PredictedStart(None, f"More than {MOST_WAITING:,} runs wait; the queue page shows an estimate after submission.")
    run = replace(waiting_run(spec, needs, team_id, now.timestamp()), home=_home(spec, team_id))
    decisions = policy.plan(replace(snapshot, waiting=(*snapshot.waiting, run)), now.timestamp())
    if any(placement.run_id == NEW_RUN for placement in decisions.placements):
        return PredictedStart(now, "Its devices are free.")
    reason = decisions.reasons[NEW_RUN]
    start = reason.estimated_start
    return PredictedStart(None if start is None else datetime.fromtimestamp(start, UTC), reason.text, reason.sooner)


@cache
def _kept() -> WaitingRuns:
    """The waiting runs that this process has read, for the next prediction."""
    return WaitingRuns()


def _home(spec: RunSpec, team_id: int) -> tuple[int, str] | None:
    """The node with a fork's checkpoint, where storage is not shared."""
    saved = None if settings.OPPO_ARTIFACTS_SHARED else fork_source(spec, team_id)
    return None if saved is None else (saved.attempt.node_id, saved.attempt.node.name)
