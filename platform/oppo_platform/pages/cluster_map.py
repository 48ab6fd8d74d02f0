"""The map of the cluster: pools, their nodes, and on each node blocks of devices of one run."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

COLUMNS = 8  # of the map; a node with fewer devices gets wider blocks
WORDS = {"unknown": "draining", "quarantined": "quarantined", "draining": "draining"}


def group_by_pool(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`nodes_overview` by pool: `{name, nodes, devices, in_use}`; each node gets `blocks` in addition to its devices."""
    spread = Counter(holder for node in nodes for holder in {device["holder"] for device in node["devices"]})
    by_name = sorted(nodes, key=lambda node: (node["pool"] is None, node["pool"] or "", node["name"]))
    pools = []
    for name, group in groupby(by_name, key=lambda node: node["pool"]):
        members = [{**node, "blocks": _blocks(node, spread)} for node in group]
        devices = [device for node in members for device in node["devices"]]
        in_use = sum(device["run"] is not None for device in devices)
        pools.append({"name": name, "nodes": members, "devices": len(devices), "in_use": in_use})
    return pools


def _blocks(node: dict[str, Any], spread: Counter[int]) -> list[dict[str, Any]]:
    """Adjacent devices of one run as one block, with its number of nodes (`spread`, by holder); other devices one by one."""
    devices = node["devices"]
    wide = max(1, COLUMNS // max(1, len(devices)))
    blocks = []
    for key, group in groupby(enumerate(devices), key=lambda item: item[1]["holder"] or -item[0] - 1):
        members = [device for _, device in group]
        shares = [device["busy_share"] for device in members if device["busy_share"] is not None]
        blocks.append(
            {
                "devices": members,
                "model": members[0]["model"],
                "run": members[0]["run"],
                "nodes": spread[members[0]["holder"]] if members[0]["holder"] else 0,
                "span": min(COLUMNS, wide * len(members)),
                "busy": sum(shares) / len(shares) if shares and key > 0 else None,
                **_look(node, members[0]),
            }
        )
    return blocks


def _look(node: dict[str, Any], device: dict[str, Any]) -> dict[str, str]:
    """Appearance of a device without a run: `look`, its label `word`, and `why`."""
    if not node["live"]:
        return {"look": "draining", "word": "unreachable", "why": ""}
    if device["state"] == "quarantined":
        return {"look": "bad", "word": "quarantined", "why": device["why"]}
    if device["state"] != "ready":
        return {"look": "draining", "word": WORDS.get(device["state"], device["state"]), "why": device["why"]}
    if node["drained_at"] or node["skew"]:
        return {"look": "draining", "word": "drained", "why": node["drain_reason"] or node["skew"]}
    if node["low_disk"]:
        return {"look": "bad", "word": "low disk", "why": node["low_disk"]}
    return {"look": "free", "word": "free", "why": ""}
