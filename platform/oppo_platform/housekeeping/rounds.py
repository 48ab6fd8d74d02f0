"""What must be done now and then, whoever does it: a round seals the series of attempts that have enough hot points, looks after
runs, and takes stock of what they take.

Nothing here waits for room to be made, which may take minutes: that has rounds of its own (`storage.housekeeping.make_room`).
"""

from __future__ import annotations

from oppo_platform import clock
from oppo_platform.alerts.evaluator import look_after_runs
from oppo_platform.api.idempotency import forget_old_replies
from oppo_platform.storage.housekeeping import take_stock
from oppo_platform.telemetry.compaction import attempts_to_compact, compact
from oppo_platform.telemetry.models import HousekeeperBeat


def keep_house() -> int:
    """One round. Returns how many points were sealed. Several housekeepers at once are harmless."""
    beat, began = HousekeeperBeat.objects.first(), clock.now()
    attempts = attempts_to_compact()
    sealed = sum(compact(attempt_id) for attempt_id in attempts)
    look_after_runs(away=began - beat.last_round_at if beat is not None else None)
    take_stock(attempts)
    forget_old_replies()
    HousekeeperBeat.objects.update_or_create(pk=1, defaults={"last_round_at": clock.now()})
    return sealed
