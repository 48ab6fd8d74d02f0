"""The queue, the cluster and its quotas: the data of the pages of the same names (docs/scheduling.md).

Read-only: draining a node and setting a quota need an administrator's session.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.http import HttpRequest
from ninja import Router
from typing_extensions import TypedDict

from oppo_platform.accounts.access import visible_teams
from oppo_platform.api.lookups import caller
from oppo_platform.api.paging import MOST, Cursor, Limit, paged
from oppo_platform.cluster.models import DeviceState
from oppo_platform.scheduling import selectors as scheduling
from oppo_platform.scheduling.nodes_overview import nodes_overview
from oppo_platform.scheduling.quotas import PoolQuotas, pool_quotas

router = Router()
SHOWN = ("id", "index", "kind", "model", "state", "why", "busy_share", "run")


class RunOnDevice(TypedDict):
    """The run on the device; another team's run has no id and no name."""

    id: int | None
    name: str | None


class DeviceItem(TypedDict):
    """A device of a node. `busy_share`: 0 to 1, last sample; `why`: its problem."""

    id: int
    index: int
    kind: str
    model: str
    state: DeviceState
    why: str
    busy_share: float | None
    run: RunOnDevice | None


class NodeItem(TypedDict):
    """A node. `skew` and `low_disk`: why it gets no work; both are empty if it does."""

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
    """Nodes by name, a page of them."""

    items: list[NodeItem]
    next: str | None


class Quotas(TypedDict):
    """Pools by name, with your teams in each; a page of them."""

    items: list[PoolQuotas]
    next: str | None


class QueueList(TypedDict):
    """Your waiting runs in order; their total number, and the time of the last plan."""

    items: list[scheduling.Waiting]
    next: str | None
    waiting: int
    planned_at: datetime | None


@router.get("queue", summary="Waiting runs with reasons and estimated starts")
def show_queue(request: HttpRequest, limit: Limit = MOST, cursor: Cursor = "") -> QueueList:
    """Your teams' waiting runs in order; places count the runs of all teams."""
    line = scheduling.queue_order(caller(request))
    page = paged([{"id": run_id} for run_id in line.ids], limit, cursor, lambda row: row["id"])
    queue = scheduling.waiting_runs(line, page["items"])
    return QueueList(items=queue["items"], next=page["next"], waiting=queue["waiting"], planned_at=queue["planned_at"])


@router.get("cluster", summary="Nodes and their devices")
def show_cluster(request: HttpRequest, limit: Limit = MOST, cursor: Cursor = "") -> Cluster:
    """Nodes and the use of their devices."""
    return Cluster(**paged(nodes_overview(caller(request)), limit, cursor, _node))


def _node(node: dict[str, Any]) -> NodeItem:
    devices = [{name: device[name] for name in SHOWN} for device in node["devices"]]
    return NodeItem(**{**node, "devices": devices})


@router.get("quotas", summary="Your teams' quotas and usage by pool")
def list_quotas(request: HttpRequest, limit: Limit = MOST, cursor: Cursor = "") -> Quotas:
    """Devices of each pool, in use and promised by all teams, and the quotas of yours."""
    return Quotas(**paged(pool_quotas(list(visible_teams(caller(request)))), limit, cursor, key="pool_id"))
