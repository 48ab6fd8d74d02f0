"""Quotas of teams in pools: changes and use. Each service is one transaction."""

from __future__ import annotations

import math
from collections import Counter

from django.db import transaction
from django.db.models import Count, Q
from typing_extensions import TypedDict

from oppo_platform.accounts import audit
from oppo_platform.accounts.models import Team, User
from oppo_platform.cluster.models import DeviceState, Pool
from oppo_platform.notify import wake_scheduler
from oppo_platform.runs.models import Allocation
from oppo_platform.scheduling.models import TeamQuota, TeamShare

MOST_DEVICES, HEAVIEST = 100_000, 1000.0


class QuotaError(ValueError):
    """An invalid quota; the message says why."""


class TeamInPool(TypedDict):
    """A team's quota and use in a pool. `borrow_cap` None: all idle devices; `nominal` 0 and None without a quota."""

    team: str
    team_id: int
    weight: float
    nominal: int
    borrow_cap: int | None
    in_use: int


class PoolQuotas(TypedDict):
    """A pool, its devices, and its teams by name. `promised` is the sum of all teams' nominal devices."""

    pool: str
    pool_id: int
    devices: int
    in_use: int
    promised: int
    teams: list[TeamInPool]


@transaction.atomic
def set_quota(team_id: int, pool_id: int, nominal: int, borrow_cap: int | None, actor: User | str = audit.SHELL) -> TeamQuota:
    """Set a team's own devices in a pool, and how many more it may borrow (None: all idle ones).

    The sum may exceed the pool's devices; the page says so, because nodes come and go.

    Raises:
        QuotaError: a number is negative or too large.
    """
    for what, number in (("guaranteed devices", nominal), ("borrowed devices", borrow_cap or 0)):
        if not 0 <= number <= MOST_DEVICES:
            raise QuotaError(f"A team can have 0 to {MOST_DEVICES:,} {what}, not {number:,}.")
    quota, _ = TeamQuota.objects.update_or_create(
        team_id=team_id, pool_id=pool_id, defaults={"nominal": nominal, "borrow_cap": borrow_cap}
    )
    audit.record(team_id, actor, "quota.set", f"pool {quota.pool}", devices=nominal, borrows=borrow_cap)
    wake_scheduler()
    return quota


@transaction.atomic
def set_weight(team_id: int, weight: float, actor: User | str = audit.SHELL) -> TeamShare:
    """Set a team's weight in fair sharing of idle devices. Raises `QuotaError`."""
    if not math.isfinite(weight) or not 0 < weight <= HEAVIEST:
        raise QuotaError(f"A fair-share weight must be above 0 and at most {HEAVIEST:,.0f}.")
    share, _ = TeamShare.objects.update_or_create(team_id=team_id, defaults={"weight": weight})
    audit.record(team_id, actor, "quota.weight", "the team", weight=weight)
    wake_scheduler()
    return share


def devices_in_use() -> Counter[tuple[int, int]]:
    """Devices that each (team, pool) holds now."""
    held = Allocation.objects.filter(released_at__isnull=True, device__node__pool__isnull=False)
    rows = held.values_list("attempt__run__project__team_id", "device__node__pool_id").annotate(n=Count("pk"))
    return Counter({(team_id, pool_id): count for team_id, pool_id, count in rows})


def pool_quotas(teams: list[Team]) -> list[PoolQuotas]:
    """Every pool by name with its devices and quotas; only `teams` are listed, totals count all."""
    in_use = devices_in_use()
    quotas = {(q.team_id, q.pool_id): q for q in TeamQuota.objects.all()}
    weights = dict(TeamShare.objects.values_list("team_id", "weight"))
    present = Count("nodes__devices", filter=~Q(nodes__devices__state=DeviceState.GONE))
    return [
        PoolQuotas(
            pool=pool.name,
            pool_id=pool.pk,
            devices=pool.present,
            in_use=sum(count for (_, pool_id), count in in_use.items() if pool_id == pool.pk),
            promised=sum(quota.nominal for (_, pool_id), quota in quotas.items() if pool_id == pool.pk),
            teams=[_team_in_pool(team, pool, quotas.get((team.pk, pool.pk)), weights, in_use) for team in teams],
        )
        for pool in Pool.objects.annotate(present=present).order_by("name")
    ]


def _team_in_pool(
    team: Team, pool: Pool, quota: TeamQuota | None, weights: dict[int, float], in_use: Counter[tuple[int, int]]
) -> TeamInPool:
    return TeamInPool(
        team=team.name,
        team_id=team.pk,
        weight=weights.get(team.pk, 1.0),
        nominal=quota.nominal if quota else 0,
        borrow_cap=quota.borrow_cap if quota else None,
        in_use=in_use[team.pk, pool.pk],
    )
