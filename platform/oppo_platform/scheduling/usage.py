"""Teams' use of devices: device-seconds that decay with a half-life, for fair shares, and plain device-hours, for reports.

A device held from a to b counts ∫ 2^((t−now)/half-life) dt over a…b. Allocations are added up once, after their release; held
ones are added at query time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from django.conf import settings
from django.db import connection, transaction
from typing_extensions import TypedDict

from oppo_platform.accounts.models import Team
from oppo_platform.clock import Posix
from oppo_platform.runs.models import Allocation, Run
from oppo_platform.scheduling.models import Usage
from oppo_platform.scheduling.policy.fair_share import accrued, decayed

SETTLED_AT_ONCE = 2000


class WeekOfUse(TypedDict):
    """Device-hours of a team in a pool in the week that begins on `week` (a Monday, UTC)."""

    week: str
    pool: str
    device_hours: float


class DeviceHours(TypedDict):
    """Device-hours of a run, from the assignment on, and number of devices that it holds now."""

    device_hours: float
    devices: int


def run_device_hours(run: Run, now: datetime) -> DeviceHours:
    """The run's own use, over all its attempts."""
    times = Allocation.objects.filter(attempt__run=run).values_list("created_at", "released_at")
    held = [((end or now) - start, end is None) for start, end in times]
    whole = sum((length for length, _ in held), timedelta())
    return DeviceHours(device_hours=whole.total_seconds() / 3600, devices=sum(live for _, live in held))


def decayed_seconds(start: float, end: float, now: float, half_life_s: float) -> float:
    """Decayed device-seconds at `now` of one device held from `start` to `end`, in POSIX seconds."""
    return decayed(accrued(1, end - start, half_life_s), now - end, half_life_s)


@transaction.atomic
def settle(now: datetime) -> int:
    """Add released allocations to their teams' `Usage`, each once. Returns their number.

    The scheduler's cycle calls it, whose lock excludes another one.
    """
    half_life = settings.OPPO_USAGE_HALF_LIFE_S
    released = Allocation.objects.select_for_update(of=("self",)).filter(settled=False, released_at__isnull=False)
    rows = list(
        released.order_by("pk").values_list("pk", "attempt__run__project__team_id", "created_at", "released_at")[:SETTLED_AT_ONCE]
    )
    if not rows:
        return 0
    added: dict[int, float] = defaultdict(float)
    for _, team_id, start, end in rows:
        added[team_id] += decayed_seconds(start.timestamp(), end.timestamp(), now.timestamp(), half_life)
    known = {usage.team_id: usage for usage in Usage.objects.select_for_update().filter(team_id__in=added).order_by("team_id")}
    for team_id, seconds in added.items():
        usage = known.setdefault(team_id, Usage(team_id=team_id, at=now))
        usage.device_seconds = decayed(usage.device_seconds, (now - usage.at).total_seconds(), half_life) + seconds
        usage.at = now
    written = [Usage(team_id=team_id, device_seconds=usage.device_seconds, at=now) for team_id, usage in sorted(known.items())]
    Usage.objects.bulk_create(written, update_conflicts=True, unique_fields=["team"], update_fields=["device_seconds", "at"])
    Allocation.objects.filter(pk__in=[row[0] for row in rows]).update(settled=True)
    return len(rows)


class Unsettled(NamedTuple):
    """An allocation that `Usage` does not have: held, or released since the last cycle."""

    device_id: int
    attempt_id: int
    run_id: int
    team_id: int
    start: float  # POSIX seconds
    end: float | None


def unsettled() -> list[Unsettled]:
    """All of them, by device."""
    fields = (
        "device_id",
        "attempt_id",
        "attempt__run_id",
        "attempt__run__project__team_id",
        Posix("created_at"),
        Posix("released_at"),
    )
    rows = Allocation.objects.filter(settled=False).order_by("device_id").values_list(*fields)
    return [Unsettled(*row) for row in rows]


def decayed_usage(now: datetime, allocations: Iterable[Unsettled] | None = None) -> dict[int, float]:
    """Decayed device-seconds of every team that has used a device, held ones included. `allocations`: if already read."""
    half_life, instant = settings.OPPO_USAGE_HALF_LIFE_S, now.timestamp()
    used: dict[int, float] = defaultdict(float)
    for team_id, seconds, at in Usage.objects.values_list("team_id", "device_seconds", "at"):
        used[team_id] += decayed(seconds, (now - at).total_seconds(), half_life)
    rows = unsettled() if allocations is None else allocations
    equal = Counter((row.team_id, row.start, row.end) for row in rows)  # those of a run's devices
    for (team_id, start, end), devices in equal.items():
        used[team_id] += devices * decayed_seconds(start, instant if end is None else end, instant, half_life)
    return dict(used)


def weekly_usage(team: Team, now: datetime, weeks: int = 12) -> list[WeekOfUse]:
    """The team's device-hours by week and pool, oldest first; the current week last, without weeks of no use."""
    monday = (now - timedelta(days=now.weekday())).replace(hour=0, minute=0, second=0, microsecond=0)
    first = monday - timedelta(weeks=weeks - 1)
    with connection.cursor() as cursor:
        cursor.execute(WEEKLY, {"team": team.pk, "first": first, "last": monday, "now": now})
        return [WeekOfUse(week=row[0].isoformat(), pool=row[1], device_hours=float(row[2])) for row in cursor.fetchall()]


# A device held over midnight between Sunday and Monday counts in both weeks, proportionally.
WEEKLY = """
    SELECT (week AT TIME ZONE 'UTC')::date, COALESCE(pool.name, device.model),
           SUM(EXTRACT(EPOCH FROM LEAST(COALESCE(held.released_at, %(now)s), week + interval '7 days')
                                  - GREATEST(held.created_at, week))) / 3600
      FROM generate_series(%(first)s::timestamptz, %(last)s::timestamptz, interval '7 days') AS week
      JOIN scheduling_allocation AS held
        ON held.created_at < week + interval '7 days' AND COALESCE(held.released_at, %(now)s) > week
      JOIN runs_attempt AS attempt ON attempt.id = held.attempt_id
      JOIN runs_run AS run ON run.id = attempt.run_id
      JOIN runs_project AS project ON project.id = run.project_id
      JOIN cluster_device AS device ON device.id = held.device_id
      JOIN cluster_node AS node ON node.id = device.node_id
      LEFT JOIN cluster_pool AS pool ON pool.id = node.pool_id
     WHERE project.team_id = %(team)s
     GROUP BY 1, 2 ORDER BY 1, 2
"""
