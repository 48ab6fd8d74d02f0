"""One round of housekeeping: compacts series, evaluates alerts, and measures storage use.

Freeing disk space may take minutes and has rounds of its own (`storage.housekeeping.make_room`).
"""

from __future__ import annotations

from oppo_platform import clock
from oppo_platform.alerts.evaluator import evaluate_runs
from oppo_platform.api.idempotency import forget_old_replies
from oppo_platform.storage.housekeeping import take_stock
from oppo_platform.telemetry.compaction import attempts_to_compact, compact
from oppo_platform.telemetry.models import HousekeeperBeat


def run_round() -> int:
    """One round. Returns the number of compacted points. Concurrent housekeepers are safe."""
    beat, began = HousekeeperBeat.objects.first(), clock.now()
    attempts = attempts_to_compact()
    sealed = sum(compact(attempt_id) for attempt_id in attempts)
    evaluate_runs(away=began - beat.last_round_at if beat is not None else None)
    take_stock(attempts)
    forget_old_replies()
    HousekeeperBeat.objects.update_or_create(pk=1, defaults={"last_round_at": clock.now()})
    return sealed
