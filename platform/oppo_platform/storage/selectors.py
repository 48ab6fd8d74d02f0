"""Queries of disk usage for pages and the API."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F, QuerySet, Window
from django.db.models.functions import RowNumber
from django.http import HttpRequest
from typing_extensions import TypedDict

from oppo_platform import clock
from oppo_platform.accounts.access import memberships
from oppo_platform.accounts.models import Role, Team, User
from oppo_platform.clock import iso
from oppo_platform.runs.models import Run
from oppo_platform.storage.database_disk import low_database
from oppo_platform.storage.models import PARTS, FolderDeletion, RunStorage, TeamStorage
from oppo_platform.storage.quotas import NEARLY, QuotaUsage, quota_usage_by_team
from oppo_platform.storage.retention import starts_at, unprotected_runs, with_surplus_checkpoints

SHOWN = 20
SOON = 8


class Taken(TypedDict):
    """Disk usage of a run, bytes; `measured_at` None: not yet measured. Times are ISO 8601 in UTC."""

    bytes: int
    parts: dict[str, int]
    measured_at: str | None
    detail_deleted_at: str | None


class LargeRun(TypedDict):
    """A run in the list of the largest ones."""

    id: int
    name: str
    project: str
    state: str
    bytes: int
    telemetry: int
    checkpoints: int
    in_trash: bool


class PendingFolder(TypedDict):
    """A folder of a deleted run that is still on a disk; `node` None: on the platform's."""

    run: int
    node: str | None
    bytes: int
    error: str


class TeamTaken(TypedDict):
    """Disk usage and quota of a team, bytes; `quota_bytes` None: no limit."""

    team: str
    team_id: int
    used_bytes: int
    quota_bytes: int | None
    largest: list[LargeRun]
    to_delete: list[PendingFolder]


def taken_by(run: Run) -> Taken:
    """Disk usage of a run, as of the last measurement."""
    row = RunStorage.objects.filter(run=run).first()
    if row is None:
        return Taken(bytes=0, parts=dict.fromkeys(PARTS, 0), measured_at=None, detail_deleted_at=None)
    deleted_at = row.detail_deleted_at
    return Taken(
        bytes=row.bytes,
        parts={part: getattr(row, part) for part in PARTS},
        measured_at=iso(row.measured_at),
        detail_deleted_at=iso(deleted_at) if deleted_at else None,
    )


def team_taken(team: Team, shown: int = SHOWN) -> TeamTaken:
    """Disk usage of one team, with its largest runs."""
    return teams_taken([team], shown)[0]


def teams_taken(teams: Sequence[Team], shown: int = SHOWN) -> list[TeamTaken]:
    """The same for each team, in the given order, with as many queries as for one."""
    ids = [team.pk for team in teams]
    now, large, folders = quota_usage_by_team(ids), _largest(ids, shown), _pending(ids)
    return [
        TeamTaken(
            team=team.name,
            team_id=team.pk,
            used_bytes=now[team.pk].used,
            quota_bytes=now[team.pk].quota,
            largest=[_large_run(row) for row in large[team.pk]],
            to_delete=[_pending_folder(row) for row in folders[team.pk]],
        )
        for team in teams
    ]


def _largest(team_ids: Sequence[int], shown: int) -> dict[int, list[RunStorage]]:
    """Team id → its largest runs, the largest first."""
    order = ("-bytes", "run")
    rows = RunStorage.objects.filter(run__project__team__in=team_ids, bytes__gt=0)
    rows = rows.alias(place=_place("run__project__team", order)).filter(place__lte=shown)
    largest: defaultdict[int, list[RunStorage]] = defaultdict(list)
    for row in rows.select_related("run__project").defer("run__spec").order_by(*order):
        largest[row.run.project.team_id].append(row)
    return largest


def _place(group: str, order: Sequence[str]) -> Window:
    """A row's number within its group, from 1."""
    return Window(RowNumber(), partition_by=F(group), order_by=order)


def _large_run(row: RunStorage) -> LargeRun:
    return LargeRun(
        id=row.run_id,
        name=row.run.name,
        project=row.run.project.name,
        state=row.run.state,
        bytes=row.bytes,
        telemetry=row.bytes - row.checkpoints,
        checkpoints=row.checkpoints,
        in_trash=row.run.deleted_at is not None,
    )


def _pending_folder(row: FolderDeletion) -> PendingFolder:
    return PendingFolder(run=row.run_number, node=row.node.name if row.node else None, bytes=row.bytes, error=row.error)


class Upcoming(TypedDict):
    """A deletion planned by retention."""

    id: int
    name: str
    what: str
    at: datetime


def upcoming(team_id: int) -> list[Upcoming]:
    """The next deletions by the team's retention rules, the soonest first."""
    row = TeamStorage.objects.filter(team=team_id).first()
    begins = starts_at(row) if row else None
    if row is None or begins is None:
        return []
    ends = unprotected_runs(team_id).order_by("ended_at", "pk")
    detailed = ends.filter(storage__detail_deleted_at__isnull=True)
    planned: list[Upcoming] = []
    for days, runs, what in ((row.run_days, ends, "the whole run"), (row.detail_days, detailed, "timeline, samples and logs")):
        if days is not None:
            planned += [
                Upcoming(id=run.pk, name=run.name, what=what, at=max(begins, run.ended_at + timedelta(days=days)))
                for run in runs[:SOON]
            ]
    for run in with_surplus_checkpoints(row)[:SOON]:
        surplus = run.kept - (row.keep_checkpoints or 0)  # type: ignore[attr-defined]  # an annotation
        what = f"{surplus} checkpoint{'s' if surplus > 1 else ''}"
        planned.append(Upcoming(id=run.pk, name=run.name, what=what, at=max(begins, clock.now())))
    return sorted(planned, key=lambda deletion: deletion["at"])[:SOON]


def all_quota_usage() -> list[tuple[Team, QuotaUsage]]:
    """Disk usage and quota of every team, by name, for administrators."""
    teams = list(Team.objects.order_by("name"))
    usage = quota_usage_by_team([team.pk for team in teams])
    return [(team, usage[team.pk]) for team in teams]


def pending_folders(team_id: int) -> list[FolderDeletion]:
    """Pending folder deletions of the team, the oldest first."""
    return _pending([team_id])[team_id]


def _pending(team_ids: Sequence[int]) -> dict[int, list[FolderDeletion]]:
    rows = FolderDeletion.objects.filter(team__in=team_ids).alias(place=_place("team", ["id"])).filter(place__lte=SHOWN)
    pending: defaultdict[int, list[FolderDeletion]] = defaultdict(list)
    for row in rows.select_related("node").order_by("id"):
        pending[row.team_id].append(row)
    return pending


def shell(request: HttpRequest) -> dict[str, Any]:
    """Template context of every page, queried lazily: the user's own teams near their quota, and a low database disk."""
    if not hasattr(request, "user") or not request.user.is_authenticated:
        return {}
    return {"nearly_full": lambda: list(_nearly_full(request.user)), "low_database": low_database}


def _nearly_full(user: User) -> QuerySet[TeamStorage]:
    owned = memberships(user).filter(role=Role.OWNER).values("team")
    nearly = TeamStorage.objects.filter(team__in=owned, quota_bytes__isnull=False, used_bytes__gte=F("quota_bytes") * NEARLY)
    return nearly.select_related("team").order_by("team__name")
