"""The scheduling policy: pure Python, a function from a snapshot of the cluster to decisions (docs/scheduling.md).

`plan(snapshot, now)` decides one cycle, `feasible_ever(run, snapshot)` rejects impossible requests at submit.
Without ORM, clock and Django: scheduler, simulator and tests call the same functions.
"""

from oppo_platform.scheduling.policy.plan import feasible_ever, plan
from oppo_platform.scheduling.policy.snapshot import (
    Backfill,
    Decisions,
    Device,
    Node,
    Placement,
    PolicySettings,
    Pool,
    Preemption,
    Quota,
    Reason,
    Reservation,
    RunningRun,
    Snapshot,
    Team,
    WaitingRun,
)

__all__ = [
    "Backfill",
    "Decisions",
    "Device",
    "Node",
    "Placement",
    "PolicySettings",
    "Pool",
    "Preemption",
    "Quota",
    "Reason",
    "Reservation",
    "RunningRun",
    "Snapshot",
    "Team",
    "WaitingRun",
    "feasible_ever",
    "plan",
]
