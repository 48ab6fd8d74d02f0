"""One scheduler cycle: fence silent attempts, plan, allocate, preempt, store reasons, and send orders after the commit.

`policy.plan` decides on a snapshot of the database (`build_snapshot`); this module applies the decisions.

Guarantees: a transaction-scoped advisory lock excludes concurrent schedulers, so a second one is harmless; the partial unique
index on allocations makes double allocation impossible even without the lock; a lost, repeated or late launch order is harmless,
because claiming is a compare-and-set and every heartbeat repeats unclaimed orders.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from django.db import connection, transaction

from oppo_platform import clock
from oppo_platform.runs.lifecycle import pause_overtime, preempt_run
from oppo_platform.scheduling.allocate import allocate
from oppo_platform.scheduling.build_snapshot import build_snapshot
from oppo_platform.scheduling.dispatch import send_due
from oppo_platform.scheduling.liveness import credit_downtime, fence_absent, fence_expired, release_unclaimed
from oppo_platform.scheduling.policy import Decisions, plan
from oppo_platform.scheduling.usage import settle
from oppo_platform.scheduling.wait_reasons import StoredCycle, store_reservations, store_waiting
from oppo_platform.scheduling.waiting_runs import WaitingRuns

LOCK_KEY = 0x4F50504F  # "OPPO"


@dataclass(frozen=True, slots=True)
class CycleResult:
    """Decisions of a cycle, and what was applied. `took_s`: seconds until that was committed."""

    decisions: Decisions
    placed: int
    preempted: int
    fenced: int
    took_s: float
    sent: int

    def counts(self) -> dict[str, int]:
        """The numbers, for a log."""
        waiting = len(self.decisions.reasons)
        return {"placed": self.placed, "preempted": self.preempted, "fenced": self.fenced, "waiting": waiting, "sent": self.sent}


@dataclass(slots=True)
class Kept:
    """What a scheduler process keeps between its cycles, so that it reads and writes only what has changed."""

    waiting: WaitingRuns = field(default_factory=WaitingRuns)
    stored: StoredCycle | None = None


def run_cycle(kept: Kept | None = None) -> CycleResult | None:
    """One cycle; None if another scheduler's cycle is running. `kept`: of the process's earlier cycles."""
    kept, started = kept or Kept(), time.monotonic()
    with transaction.atomic():
        if not _try_lock():
            return None
        now = clock.now()
        last = credit_downtime(now)
        fenced = fence_expired(now) + release_unclaimed(now) + fence_absent(now)
        pause_overtime(now)
        settle(now)
        decisions = plan(build_snapshot(now, kept.waiting), now.timestamp())
        placed = allocate(decisions.placements, now)
        preempted = sum(preempt_run(victim.run_id, victim.text) for victim in decisions.preemptions)
        store_reservations(decisions)
        stored = store_waiting(decisions, kept.waiting.changed, now, last, kept.stored)
    kept.stored = stored
    took_s = time.monotonic() - started
    return CycleResult(decisions, placed, preempted, fenced, took_s, sent=send_due())


def _try_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [LOCK_KEY])
        return bool(cursor.fetchone()[0])
