"""Deliberately broken policies: each changes one part, and names the law that has to notice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oppo_platform.scheduling.policy.backfill as backfill
import oppo_platform.scheduling.policy.placement as placement
import oppo_platform.scheduling.policy.queue as queue
from oppo_platform.scheduling.policy.fair_share import Shares
from oppo_platform.scheduling.policy.placement import ClusterDevices
from oppo_platform.scheduling.policy.plan_state import PlanState
from oppo_platform.scheduling.policy.preemption import VictimSearch
from oppo_platform.scheduling.policy.quota import Ledger, Tier
from oppo_platform.scheduling.policy.snapshot import PolicySettings

# The package's name `plan` is the function; this is the module.
plan = sys.modules["oppo_platform.scheduling.policy.plan"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A name for people, what is replaced by what, and the law that fails then."""

    name: str
    owner: Any
    attribute: str
    replacement: Callable[..., Any]
    breaks: str


def _half(fit: Callable[..., Any]) -> Callable[..., Any]:
    def shortened(*args: Any) -> Any:
        devices = fit(*args)
        return devices and {node_id: ids[: max(1, len(ids) - 1)] for node_id, ids in devices.items()}

    return shortened


def _one_more(spare: Callable[..., Any]) -> Callable[..., Any]:
    def wasteful(search: VictimSearch, chosen: list[Any]) -> list[Any]:
        kept = spare(search, chosen)
        return kept + [v for v in search.candidates if v not in kept and search._allowed([*kept, v])][:1]

    return wasteful


def _only_the_first(explain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda state: dict(list(explain(state).items())[:1])


def _own_only_in_name(tier: Callable[..., Tier]) -> Callable[..., Tier]:
    return lambda ledger, account, devices: max(Tier.BORROWED, tier(ledger, account, devices))


def _whatever_is_borrowed(search: VictimSearch, team_id: int, lost: int, *_: int) -> bool:
    return search.state.ledger.borrowed((team_id, search.place.pool_id), lost) > 0


def _as_it_comes(bins: Any, part: int, nodes: int, amount: Any) -> Any:
    return placement.select_whole_nodes(bins, part * nodes, nodes, amount)


def _the_same(settings: PolicySettings, preempted: int) -> float:
    return settings.min_runtime_s


def _endless(settings: PolicySettings, preempted: int) -> float:
    return settings.min_runtime_s * 2**preempted


MUTANTS = [
    Mutant("placed devices stay free", ClusterDevices, "take", lambda *_: [], "no_device_twice"),
    Mutant("no limit to borrowing", Ledger, "limit", lambda *_: None, "no_quota_exceeded"),
    Mutant("a gang starts with a device less", ClusterDevices, "fit", _half(ClusterDevices.fit), "gangs_whole"),
    Mutant("so many nodes are so many at most", placement, "select_even", _as_it_comes, "exact_nodes"),
    Mutant("only the head is told why", plan, "explain", _only_the_first(plan.explain), "everyone_told"),
    Mutant("ties are broken by chance", queue, "PLACE_IN_TEAM", lambda run: -run.priority, "deterministic"),
    Mutant(
        "young runs are stopped", PlanState, "may_stop", lambda state, run: run.run_id not in state.leaving, "victims_allowed"
    ),
    Mutant("who was preempted is as young as others", PolicySettings, "protection_s", _the_same, "victims_allowed"),
    Mutant("protection grows without end", PolicySettings, "protection_s", _endless, "owners_get_their_own"),
    Mutant("what is owned is reclaimed", VictimSearch, "may_reclaim", lambda *_: True, "only_borrowed_reclaimed"),
    Mutant(
        "one victim more than needed", VictimSearch, "_drop_unneeded", _one_more(VictimSearch._drop_unneeded), "victims_minimal"
    ),
    Mutant("backfill without a bound", backfill, "max_stay_s", lambda *_: 0.0, "reservations_kept"),
    Mutant("own quota does not go first", Ledger, "tier", _own_only_in_name(Ledger.tier), "own_quota_first"),
    Mutant("nothing is kept for the head", ClusterDevices, "reserve_devices", lambda *_: None, "no_starvation"),
    Mutant("reclaim whenever something is borrowed", VictimSearch, "may_reclaim", _whatever_is_borrowed, "no_ping_pong"),
    Mutant("nothing is charged in advance", Shares, "charge", lambda *_: None, "burst_does_not_win"),
    Mutant("reserved devices go to whoever fits", backfill, "max_stay_s", lambda *_: 1.0, "reservation_kept_in_time"),
]
