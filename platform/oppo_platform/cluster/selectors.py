"""Liveness and protocol version of nodes. Device use is in `scheduling.nodes_overview`."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db.models import QuerySet

from oppo_contract import wire
from oppo_platform import clock
from oppo_platform.cluster.models import Node


def live_nodes() -> QuerySet[Node]:
    """Nodes with a heartbeat within the last minute (`OPPO_NODE_FRESH_S`)."""
    return Node.objects.filter(last_seen_at__gt=clock.now_in_query() - timedelta(seconds=settings.OPPO_NODE_FRESH_S))


def version_problem(node: Node) -> str:
    """Why a node gets no work because of its worker's version; empty if the version is supported."""
    if node.wire_version in wire.SUPPORTED_VERSIONS:
        return ""
    supported = " and ".join(map(str, wire.SUPPORTED_VERSIONS))
    return f"its worker uses protocol version {node.wire_version}, the platform supports {supported}; update the older one"
