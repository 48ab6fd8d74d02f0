"""The queue, the cluster and its quotas over HTTP: what the pages of the same names show (docs/scheduling.md).

They are read only: draining a node and setting a quota are an administrator's, who acts with a session and never with a token.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import Router
from typing_extensions import TypedDict

from oppo_platform.accounts.access import visible_teams
from oppo_platform.api.subjects import person
from oppo_platform.cluster.models import DeviceState
from oppo_platform.cluster.selectors import nodes_overview
from oppo_platform.scheduling import selectors as scheduling
from oppo_platform.scheduling.quotas import PoolQuotas, pool_quotas

router = Router()
SHOWN = ("id", "index", "kind", "model", "state", "why", "busy_share", "run")


class RunOnDevice(TypedDict):
    """Whose the device is; of another team's run nothing is told but that there is one."""

    id: int | None
    name: str | None


class DeviceItem(TypedDict):
    """A device of a node. `busy_share` from 0 to 1 as its driver told last; `why`: what is wrong with it."""

    id: int
    index: int
    kind: str
    model: str
    state: DeviceState
    why: str
    busy_share: float | None
    run: RunOnDevice | None


class NodeItem(TypedDict):
    """A node. `skew` and `low_disk` say why it gets no work; both are empty when it does."""

    id: int
    name: str
    hostname: str
    pool: str | None
    live: bool
    last_seen_at: str | None
    drained_at: str | None
    drain_reason: str
    skew: str
    low_disk: str
    devices: list[DeviceItem]


class Cluster(TypedDict):
    """Nodes by name."""

    items: list[NodeItem]


class Quotas(TypedDict):
    """Pools by name, with your teams in each."""

    items: list[PoolQuotas]


@router.get("queue", summary="What waits, why, and when it is expected to start")
def queue(request: HttpRequest) -> scheduling.Queue:
    """Your teams' waiting runs in their order; places count the runs of all teams."""
    return scheduling.queue(person(request))


@router.get("cluster", summary="Nodes and their devices")
def cluster(request: HttpRequest) -> Cluster:
    """Which nodes live, and who uses what."""
    return Cluster(items=[_node(node) for node in nodes_overview(person(request))])


def _node(node: dict[str, Any]) -> NodeItem:
    devices = [{name: device[name] for name in SHOWN} for device in node["devices"]]
    return NodeItem(**{**node, "devices": devices})


@router.get("quotas", summary="What your teams own and borrow of each pool")
def quotas(request: HttpRequest) -> Quotas:
    """Devices of each pool, in use and promised by all teams, and the quotas of yours."""
    return Quotas(items=pool_quotas(list(visible_teams(person(request)))))
