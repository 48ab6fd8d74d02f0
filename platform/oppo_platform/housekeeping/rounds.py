"""Periodic tasks: compaction, alert evaluation and usage measurement in one round; deletion, which may take minutes, in another.

Concurrent housekeepers are harmless.
"""

from __future__ import annotations

from oppo_platform import clock
from oppo_platform.alerts.evaluator import evaluate_runs
from oppo_platform.api.idempotency import forget_old_replies
from oppo_platform.storage.artifact_deletion import delete_local_folders
from oppo_platform.storage.database_disk import check_database_disk
from oppo_platform.storage.purging import purge
from oppo_platform.storage.retention import apply_retention
from oppo_platform.storage.usage import mark_changed, measure_due_runs, update_team_totals
from oppo_platform.telemetry.compaction import attempts_to_compact, compact
from oppo_platform.telemetry.models import HousekeeperBeat


def run_round() -> int:
    """One round without deletions. Returns the number of compacted points."""
    beat, began = HousekeeperBeat.objects.first(), clock.now()
    attempts = attempts_to_compact()
    compacted = sum(compact(attempt_id) for attempt_id in attempts)
    evaluate_runs(away=began - beat.last_round_at if beat is not None else None)
    check_database_disk()
    mark_changed(attempts)
    measure_due_runs()
    forget_old_replies()
    HousekeeperBeat.objects.update_or_create(pk=1, defaults={"last_round_at": clock.now()})
    return compacted


def run_deletions() -> int:
    """Delete due rows, then folders. Outside transactions only. Returns the number of rows, runs with retention and folders."""
    deleted = purge() + apply_retention()
    if deleted:
        update_team_totals()
    return deleted + delete_local_folders()
