"""Joins a node to a cluster: `oppo worker join URL TOKEN`."""

from __future__ import annotations

import re
import socket
from contextlib import closing
from pathlib import Path

from oppo_contract.machine import available_cores
from oppo_contract.wire import Join
from worker.devices import memory_bytes
from worker.folders import NodeIdentity, WorkerFolder
from worker.platform_api import PlatformApi


def join_platform(
    folder: WorkerFolder, platform_url: str, token: str, models_roots: list[Path], name: str | None = None
) -> NodeIdentity:
    """Join and save the node's identity; joining again replaces it. Raises as `PlatformApi`."""
    host = socket.gethostname()
    name = name or re.sub(r"[^A-Za-z0-9._-]", "-", host).strip("-._") or "node"
    with closing(PlatformApi(platform_url, token)) as api:
        joined = api.join(Join(name=name, hostname=host, cpus=available_cores(), memory_bytes=memory_bytes()))
    identity = NodeIdentity(
        platform_url=platform_url.rstrip("/"),
        name=name,
        node_id=joined.node_id,
        node_token=joined.node_token,
        queue=joined.queue,
        broker_url=joined.broker_url,
        artifact_root=joined.artifact_root,
        models_roots=[root.resolve() for root in models_roots],
    )
    folder.save_identity(identity)
    return identity
