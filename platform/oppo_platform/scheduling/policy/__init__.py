"""The scheduling policy: pure Python, a function from a snapshot of the cluster to decisions (docs/scheduling.md).

`plan(snapshot, now)` decides one cycle, `feasible_ever(run, snapshot)` refuses at submit runs that can never start.
No ORM, no clock, no Django: the scheduler, the simulator and the tests call the same functions.
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
