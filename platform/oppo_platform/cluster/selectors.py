"""Queries of the cluster: live nodes, and their catalogues. Device use is in `scheduling.nodes_overview`."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db.models import QuerySet

from oppo_contract import wire
from oppo_platform import clock
from oppo_platform.cluster.models import CatalogueItem, Node


def live_nodes() -> QuerySet[Node]:
    """Nodes with a heartbeat within the last minute (`OPPO_NODE_FRESH_S`)."""
    return Node.objects.filter(last_seen_at__gt=clock.now() - timedelta(seconds=settings.OPPO_NODE_FRESH_S))


def catalogue_ids(kind: str) -> list[str]:
    """Ids of models (`model`) or prompts (`prompts`) that a live worker can read, sorted."""
    items = CatalogueItem.objects.filter(node__in=live_nodes(), kind=kind)
    return list(items.order_by("entry_id").values_list("entry_id", flat=True).distinct())


def version_problem(node: Node) -> str:
    """Why a node gets no work because of its worker's version; empty if the version is supported."""
    if node.wire_version in wire.SUPPORTED_VERSIONS:
        return ""
    spoken = " and ".join(map(str, wire.SUPPORTED_VERSIONS))
    return f"its worker uses protocol version {node.wire_version}, the platform supports {spoken}; update the older one"
