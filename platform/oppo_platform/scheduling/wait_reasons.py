"""Stores why queued runs wait: reason, place in the queue and estimated start, written only when they change.

The queue's order is one list in one row: a start moves all later runs, and updating ten thousand rows would take longer than the
plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from oppo_platform.runs.transitions import update_waiting_reasons
from oppo_platform.scheduling.kept_rows import KeptRows
from oppo_platform.scheduling.models import Reservation, SchedulerBeat, WaitingReason
from oppo_platform.scheduling.policy import Decisions, Reason

# An estimate is rewritten when it has changed by more than this, or by a tenth of the remaining time.
ESTIMATE_MOVED_S, ESTIMATE_MOVED = 60.0, 0.1
FIELDS = ["code", "text", "detail", "sooner", "estimated_start", "changed_at"]


class StoredReason(NamedTuple):
    """Stored reason of a run; a plain row, because there are thousands and few change."""

    code: str
    text: str
    sooner: str
    estimated_start: datetime | None


def stored_reasons() -> KeptRows[StoredReason]:
    """The stored reasons."""
    table = WaitingReason._meta.db_table
    return KeptRows(f"SELECT string_agg(run_id || ':' || xmin || ctid, ' ') FROM {table}", _read_stored)  # noqa: S608 - no input


def _read_stored(run_ids: Sequence[int]) -> dict[int, StoredReason]:
    rows = WaitingReason.objects.filter(run_id__in=run_ids).values_list("run_id", *StoredReason._fields)
    equal: dict[StoredReason, StoredReason] = {}  # few differ, and equal ones are compared once (`store_reasons`)
    stored = ((run_id, StoredReason(*values)) for run_id, *values in rows)
    return {run_id: equal.setdefault(reason, reason) for run_id, reason in stored}


def store_reasons(decisions: Decisions, now: datetime, kept: KeptRows[StoredReason] | None = None) -> int:
    """Store why each run of `decisions.reasons` waits. Returns the number of rows written. `kept`: those of earlier calls."""
    known = (kept or stored_reasons()).rows()
    written: list[WaitingReason] = []
    messages: dict[int, str] = {}
    unchanged: dict[tuple[int, int], StoredReason] = {}  # by identity of both, which thousands of runs share
    for run_id, reason in decisions.reasons.items():
        old = known.pop(run_id, None)
        pair = id(old), id(reason)
        if pair in unchanged:
            continue
        # A run that waits after a failure keeps that message; the page shows both.
        if (old is None or old.text != reason.text) and reason.code != "backoff":
            messages[run_id] = reason.text
        if old is None or _differs(old, reason, now):
            written.append(_row(run_id, reason, now))
        else:
            unchanged[pair] = old
    WaitingReason.objects.filter(run_id__in=list(known)).delete()
    WaitingReason.objects.bulk_create(written, update_conflicts=True, unique_fields=["run"], update_fields=FIELDS)
    update_waiting_reasons(messages)
    return len(written)


def store_beat(decisions: Decisions, last: SchedulerBeat, now: datetime) -> None:
    """Store the time of the cycle and the expected order of starts, if it differs from the last one: thousands of ids."""
    order = list(decisions.order)
    changed = {} if order == last.order else {"order": order}
    SchedulerBeat.objects.filter(pk=last.pk).update(last_cycle_at=now, **changed)


def store_reservations(decisions: Decisions) -> None:
    """Replace the last plan's reservations."""
    Reservation.objects.exclude(run__in=[r.run_id for r in decisions.reservations]).delete()
    rows = [
        Reservation(
            run_id=r.run_id,
            pool_id=r.pool_id,
            devices={str(node): list(ids) for node, ids in r.devices.items()},
            start=_time(r.start),
            cleared=r.cleared,
        )
        for r in decisions.reservations
    ]
    Reservation.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["run"], update_fields=["pool", "devices", "start", "cleared"]
    )


def _row(run_id: int, reason: Reason, now: datetime) -> WaitingReason:
    fields = {"code": reason.code, "text": reason.text, "detail": dict(reason.detail), "sooner": reason.sooner}
    return WaitingReason(run_id=run_id, estimated_start=_time(reason.estimated_start), changed_at=now, **fields)


def _differs(old: StoredReason, new: Reason, now: datetime) -> bool:
    changed = (old.code, old.text, old.sooner) != (new.code, new.text, new.sooner)
    if changed or old.estimated_start is None or new.estimated_start is None:
        return changed or (old.estimated_start is None) != (new.estimated_start is None)
    moved = abs(new.estimated_start - old.estimated_start.timestamp())
    return moved > max(ESTIMATE_MOVED_S, ESTIMATE_MOVED * (new.estimated_start - now.timestamp()))


def _time(posix: float | None) -> datetime | None:
    return datetime.fromtimestamp(posix, UTC) if posix is not None else None
