"""Storage quotas of teams: set by administrators, a warning at 80 %, submission refused above 100 %.

Running and queued runs are not affected. Usage is measured by the housekeeper (`storage.usage`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from django.db import transaction

from oppo_contract.byte_sizes import size
from oppo_contract.spec_errors import SpecProblem
from oppo_platform.accounts import audit
from oppo_platform.accounts.models import User
from oppo_platform.scheduling.quotas import QuotaError
from oppo_platform.storage.models import RunStorage, TeamStorage

NEARLY = 0.8
MOST_BYTES = 2**60
NAMED = 3


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """A team's disk usage and quota, bytes."""

    used: int
    quota: int | None

    @property
    def share(self) -> float:
        """Used share of the quota; 0 without one."""
        return 0.0 if self.quota is None else self.used / self.quota if self.quota else float(self.used > 0)

    @property
    def nearly(self) -> bool:
        """Whether to warn the team's owners."""
        return self.quota is not None and self.used >= NEARLY * self.quota

    @property
    def full(self) -> bool:
        """Whether new runs are refused."""
        return self.quota is not None and self.used > self.quota


def quota_usage(team_id: int) -> QuotaUsage:
    """Usage as of the last round of housekeeping."""
    return quota_usage_by_team([team_id])[team_id]


def quota_usage_by_team(team_ids: Collection[int]) -> dict[int, QuotaUsage]:
    """The same for several teams, with one query."""
    rows = TeamStorage.objects.filter(team__in=team_ids)
    usage = {row.team_id: QuotaUsage(row.used_bytes, row.quota_bytes) for row in rows}
    return dict.fromkeys(team_ids, QuotaUsage(0, None)) | usage


@transaction.atomic
def set_storage_quota(team_id: int, quota_bytes: int | None, actor: User | str = audit.SHELL) -> TeamStorage:
    """Set the quota of all runs of a team; None: no limit. Raises `QuotaError` for a value out of range."""
    if quota_bytes is not None and not 0 <= quota_bytes <= MOST_BYTES:
        raise QuotaError(f"A storage quota must be 0 to {MOST_BYTES / 2**30:,.0f} GiB.")
    row, _ = TeamStorage.objects.update_or_create(team_id=team_id, defaults={"quota_bytes": quota_bytes})
    audit.record(team_id, actor, "quota.storage", "the team", bytes=quota_bytes)
    return row


def storage_problems(team_id: int) -> list[SpecProblem]:
    """The error for a submission while the team's storage is full, with its largest runs; empty otherwise."""
    now = quota_usage(team_id)
    if not now.full:
        return []
    largest = RunStorage.objects.filter(run__project__team=team_id, bytes__gt=0).select_related("run").order_by("-bytes", "run")
    most = ", ".join(f"{row.run.name} (run {row.run_id}, {size(row.bytes)})" for row in largest.defer("run__spec")[:NAMED])
    text = f"the team's storage is full: its runs use {size(now.used)}, and its quota is {size(now.quota or 0)}."
    text += f" The largest are {most}." if most else ""
    text += " Delete runs permanently, set retention rules (both on the team's Storage page), or ask for a larger quota"
    return [SpecProblem("", text)]
