"""What waiting runs are told: reason, place in the queue and estimated start, written when they change and only then.

The order of the queue is one list in one row: a run that starts moves everybody behind it up, and writing that to each of ten
thousand rows would take longer than the plan.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from oppo_platform.runs.transitions import explain_waiting
from oppo_platform.scheduling.models import Reservation, SchedulerBeat, WaitingReason
from oppo_platform.scheduling.policy import Decisions, Reason

# An estimate is told anew when it has moved by more than this, or by a tenth of the time that is left.
ESTIMATE_MOVED_S, ESTIMATE_MOVED = 60.0, 0.1
FIELDS = ["code", "text", "detail", "sooner", "estimated_start", "changed_at"]


class Told(NamedTuple):
    """What a run was told last; a plain row, because there are thousands and few change."""

    code: str
    text: str
    sooner: str
    estimated_start: datetime | None


def tell_waiting(decisions: Decisions, now: datetime) -> int:
    """Write down why each run of `decisions.reasons` waits. Returns how many rows were written."""
    known = {run_id: Told(*told) for run_id, *told in WaitingReason.objects.values_list("run_id", *Told._fields)}
    written: list[WaitingReason] = []
    said: dict[int, str] = {}
    for run_id, reason in decisions.reasons.items():
        old = known.pop(run_id, None)
        # A run that waits after a death goes on telling what happened; the page tells both.
        if (old is None or old.text != reason.text) and reason.code != "backoff":
            said[run_id] = reason.text
        if old is None or _differs(old, reason, now):
            written.append(_row(run_id, reason, now))
    WaitingReason.objects.filter(run_id__in=list(known)).delete()
    WaitingReason.objects.bulk_create(written, update_conflicts=True, unique_fields=["run"], update_fields=FIELDS)
    explain_waiting(said)
    return len(written)


def keep_order(decisions: Decisions) -> None:
    """The order in which waiting runs would start, for whoever shows a place in the queue."""
    order = list(decisions.order)
    SchedulerBeat.objects.filter(pk=1).exclude(order=order).update(order=order)


def keep_reservations(decisions: Decisions) -> None:
    """The reservations of this plan in place of the last one's."""
    wanted = {r.run_id: r for r in decisions.reservations}
    Reservation.objects.exclude(run__in=wanted).delete()
    rows = [
        Reservation(
            run_id=r.run_id,
            pool_id=r.pool_id,
            devices={str(node): list(ids) for node, ids in r.devices.items()},
            start=_time(r.start),
            cleared=r.cleared,
        )
        for r in wanted.values()
    ]
    Reservation.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["run"], update_fields=["pool", "devices", "start", "cleared"]
    )


def _row(run_id: int, reason: Reason, now: datetime) -> WaitingReason:
    return WaitingReason(
        run_id=run_id,
        code=reason.code,
        text=reason.text,
        detail=dict(reason.detail),
        sooner=reason.sooner,
        estimated_start=_time(reason.estimated_start),
        changed_at=now,
    )


def _differs(old: Told, new: Reason, now: datetime) -> bool:
    said = (old.code, old.text, old.sooner) != (new.code, new.text, new.sooner)
    if said or old.estimated_start is None or new.estimated_start is None:
        return said or (old.estimated_start is None) != (new.estimated_start is None)
    moved = abs(new.estimated_start - old.estimated_start.timestamp())
    return moved > max(ESTIMATE_MOVED_S, ESTIMATE_MOVED * (new.estimated_start - now.timestamp()))


def _time(posix: float | None) -> datetime | None:
    return datetime.fromtimestamp(posix, UTC) if posix is not None else None
