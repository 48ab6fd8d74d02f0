"""Stores why queued runs wait: reason, place in the queue and estimated start, written only when they change.

The queue's order is one list in one row: a start moves all later runs, and updating ten thousand rows would take longer than the
plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from oppo_platform.runs.transitions import update_waiting_reasons
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


@dataclass(frozen=True, slots=True)
class StoredCycle:
    """What a cycle stored about waiting runs. It holds as long as `SchedulerBeat` names that cycle as the last one."""

    at: datetime
    reasons: Mapping[int, StoredReason]
    order: tuple[int, ...]


def read_reasons() -> dict[int, StoredReason]:
    """The stored reasons, by run id."""
    rows = WaitingReason.objects.values_list("run_id", *StoredReason._fields)
    equal: dict[StoredReason, StoredReason] = {}  # few differ, and equal ones are compared once (`_store_reasons`)
    stored = ((run_id, StoredReason(*values)) for run_id, *values in rows)
    return {run_id: equal.setdefault(reason, reason) for run_id, reason in stored}


def store_waiting(
    decisions: Decisions, changed: Collection[int], now: datetime, last_cycle_at: datetime, kept: StoredCycle | None
) -> StoredCycle:
    """Store why runs wait and the order in which they would start, as far as that has changed, and the time of the cycle.

    `changed`: runs whose rows others have changed; one that was paused and resumed since the last cycle has another message.
    `kept`: what this process stored in its last cycle; used if no other process has stored a cycle since.
    """
    if kept is not None and kept.at != last_cycle_at:
        kept = None
    reasons = _store_reasons(decisions, changed, now, read_reasons() if kept is None else kept.reasons)
    order = {} if kept is not None and kept.order == decisions.order else {"order": list(decisions.order)}  # thousands of ids
    SchedulerBeat.objects.update(last_cycle_at=now, **order)
    return StoredCycle(now, reasons, decisions.order)


def _store_reasons(
    decisions: Decisions, changed: Collection[int], now: datetime, known: Mapping[int, StoredReason]
) -> dict[int, StoredReason]:
    stored: dict[int, StoredReason] = {}
    written: list[WaitingReason] = []
    new_texts = {run_id for run_id in changed if run_id in decisions.reasons}
    # By identity, since thousands of runs share a reason: what is stored of one, and of one that replaces another.
    created: dict[int, StoredReason] = {}
    compared: dict[tuple[int, int], StoredReason] = {}
    for run_id, reason in decisions.reasons.items():
        old = known.get(run_id)
        pair = id(old), id(reason)
        same = compared.get(pair)
        if same is not None:
            stored[run_id] = same
            continue
        if old is None or old.text != reason.text:
            new_texts.add(run_id)
        if old is None or _differs(old, reason, now):
            written.append(_row(run_id, reason, now))
            stored[run_id] = created.get(id(reason)) or created.setdefault(id(reason), _stored(reason))
        else:
            stored[run_id] = compared[pair] = old
    if gone := known.keys() - stored.keys():
        WaitingReason.objects.filter(run_id__in=gone).delete()
    WaitingReason.objects.bulk_create(written, update_conflicts=True, unique_fields=["run"], update_fields=FIELDS)
    # A run that waits after a failure keeps that message; the page shows both.
    texts = {run_id: reason.text for run_id in new_texts if (reason := decisions.reasons[run_id]).code != "backoff"}
    update_waiting_reasons(texts)
    return stored


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


def _stored(reason: Reason) -> StoredReason:
    return StoredReason(reason.code, reason.text, reason.sooner, _time(reason.estimated_start))


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
