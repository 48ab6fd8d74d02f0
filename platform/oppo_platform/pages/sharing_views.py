"""The page on which teams see how they share devices, and on which administrators set quotas and take nodes out of service."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from oppo_contract.byte_sizes import size
from oppo_platform import clock
from oppo_platform.accounts.access import administers, visible_teams
from oppo_platform.accounts.models import Team
from oppo_platform.cluster import pools, services
from oppo_platform.cluster.models import Device, Node, Pool
from oppo_platform.scheduling import quotas
from oppo_platform.scheduling.nodes_overview import nodes_overview
from oppo_platform.scheduling.usage import decayed_usage, weekly_usage
from oppo_platform.storage.quotas import set_storage_quota as set_quota_of_storage
from oppo_platform.storage.selectors import all_quota_usage

WEEKS = 12


@require_GET
def sharing(request: HttpRequest) -> HttpResponse:
    """Pools with quotas, usage per team and week, and nodes. Administrators see every team, others only their own."""
    rules = administers(request.user)
    teams = list(Team.objects.order_by("name") if rules else visible_teams(request.user))
    now = clock.now()
    used = decayed_usage(now)
    everybody = sum(used.values())
    context = {
        "section": "queue",
        "rules": rules,
        "pools": quotas.pool_quotas(teams),
        "shares": [{"team": team, "share": used.get(team.pk, 0.0) / everybody if everybody else 0.0} for team in teams],
        "usage": [{"team": team.name, "weeks": weekly_usage(team, now, WEEKS)} for team in teams],
        "nodes": nodes_overview(request.user),
        "storage": [{"team": team, "level": level} for team, level in all_quota_usage() if rules or team in teams],
        "pool_names": list(Pool.objects.order_by("name").values_list("name", flat=True)),
    }
    return render(request, "sharing.html", context)


@require_POST
def set_quota(request: HttpRequest, pool_id: int, team_id: int) -> HttpResponse:
    """Set a team's quota in a pool and its fair-share weight."""
    _only_administrators(request)
    pool, team = get_object_or_404(Pool, pk=pool_id), get_object_or_404(Team, pk=team_id)

    def change() -> str:
        text = request.POST.get("borrow_cap", "").strip()
        nominal = _whole(request.POST.get("nominal", ""), "guaranteed devices")
        cap = _whole(text, "borrowed devices") if text else None
        weight = _weight(request.POST.get("weight", ""))
        with transaction.atomic():  # one form: all or nothing
            quotas.set_quota(team.pk, pool.pk, nominal, cap, request.user)
            quotas.set_weight(team.pk, weight, request.user)
        return f"{team.name} now has a guaranteed quota of {nominal} device{'' if nominal == 1 else 's'} in {pool.name}."

    return _reply(request, change)


@require_POST
def set_storage_quota(request: HttpRequest, team_id: int) -> HttpResponse:
    """Set a team's storage quota."""
    _only_administrators(request)
    team = get_object_or_404(Team, pk=team_id)

    def change() -> str:
        quota = _gibibytes(request.POST.get("gib", ""))
        set_quota_of_storage(team.pk, quota, request.user)
        return f"{team.name}'s storage quota is now {'unlimited' if quota is None else size(quota)}."

    return _reply(request, change)


@require_POST
def rename_pool(request: HttpRequest, pool_id: int) -> HttpResponse:
    """Rename a pool."""
    _only_administrators(request)
    pool = get_object_or_404(Pool, pk=pool_id)
    name = request.POST.get("name", "")
    return _reply(request, lambda: f"{pool.name} was renamed to {pools.rename_pool(pool.pk, name, request.user).name}.")


@require_POST
def steer_node(request: HttpRequest, node_id: int, deed: str) -> HttpResponse:
    """Drain a node, return it to service, or move it to another pool."""
    _only_administrators(request)
    node = get_object_or_404(Node, pk=node_id)
    reason, pool, actor = request.POST.get("reason", ""), request.POST.get("pool", ""), request.user
    deeds: dict[str, Callable[[], str]] = {
        "drain": lambda: f"{pools.drain(node.pk, reason, actor).name} is draining: no new runs; current runs continue.",
        "undrain": lambda: f"{pools.undrain(node.pk, actor).name} is back in service.",
        "move": lambda: f"{node.name} was moved to {pools.move_node(node.pk, pool, actor).pool}.",
    }
    if deed not in deeds:
        raise Http404
    return _reply(request, deeds[deed])


@require_POST
def put_back(request: HttpRequest, device_id: int) -> HttpResponse:
    """Return a quarantined device to service."""
    _only_administrators(request)
    device = get_object_or_404(Device, pk=device_id)
    return _reply(request, lambda: f"{services.put_back(device.pk, request.user)} is back in service.")


def _only_administrators(request: HttpRequest) -> None:
    if not administers(request.user):
        raise PermissionDenied("Only cluster administrators can change quotas, pools and nodes.")


def _whole(text: str, what: str) -> int:
    if not text.strip().isdecimal() or len(text) > 9:
        raise quotas.QuotaError(f"Enter an integer number of {what}.")
    return int(text)


def _gibibytes(text: str) -> int | None:
    """GiB as bytes; None if empty."""
    if not text.strip():
        return None
    try:
        return round(float(text) * 2**30)
    except (ValueError, OverflowError):
        raise quotas.QuotaError("A storage quota must be a number of GiB, such as 500 or 0.5; empty means no limit.") from None


def _weight(text: str) -> float:
    try:
        return float(text or "1")
    except ValueError:
        raise quotas.QuotaError("A fair-share weight must be a number, such as 1 or 2.5.") from None


def _reply(request: HttpRequest, change: Callable[[], str]) -> HttpResponse:
    try:
        messages.success(request, change())
    except (quotas.QuotaError, pools.PoolError) as refused:
        messages.error(request, str(refused))
    return redirect("pages:sharing")
