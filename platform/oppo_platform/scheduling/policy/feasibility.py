"""Hard feasibility: runs that cannot start even on an empty cluster, now or ever.

`partition` removes them before the plan: they wait with a reason and block no other run. `infeasible_reason` is the check at
submit, against all registered nodes and devices in any state, and the team's quota.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from oppo_platform.scheduling.policy.placement import ClusterDevices, NodeDevices, may_use
from oppo_platform.scheduling.policy.snapshot import NO_QUOTA, Node, Reason, Request, Snapshot, Team, WaitingRun

NEEDS = {
    "model": "has the model {id}",
    "prompts": "has the prompts {id}",
    "hub": "may download models from a hub (OPPO_ALLOW_HUB=1)",
}


def partition(
    waiting: Iterable[WaitingRun], cluster: ClusterDevices, teams: Iterable[Team], now: float
) -> tuple[list[WaitingRun], dict[int, Reason]]:
    """The runs that could start on an empty cluster, and the reasons of the others."""
    by_id = {team.team_id: team for team in teams}
    eligible, infeasible = list[WaitingRun](), dict[int, Reason]()
    refusals: dict[tuple[int, Request], Reason | None] = {}  # equal for equal requests of a team
    for run in waiting:
        if run.not_before is not None and run.not_before > now:
            text = "Waits before the next attempt, because the last one failed."
            infeasible[run.run_id] = Reason("backoff", text, {"not_before": run.not_before}, run.not_before)
            continue
        request = run.team_id, run.request
        if request not in refusals:
            refusals[request] = _refusal(run, by_id.get(run.team_id), cluster)
        if refusal := refusals[request]:
            infeasible[run.run_id] = refusal
        else:
            eligible.append(run)
    return eligible, infeasible


def _refusal(run: WaitingRun, team: Team | None, cluster: ClusterDevices) -> Reason | None:
    places = cluster.demand(run).places
    return _over_every_quota(run, team, [place.pool_id for place in places], cluster) if places else _unplaceable(run, cluster)


def infeasible_reason(run: WaitingRun, snapshot: Snapshot, cluster: ClusterDevices) -> Reason | None:
    """Why all registered nodes together, or the team's quota, cannot satisfy the request; None if they can."""
    groups = list(cluster.groups.values())
    pools = _fitting_pools(run, groups)
    if not pools:
        return _infeasible(run, cluster.nodes, groups, "registered")
    team = next((team for team in snapshot.teams if team.team_id == run.team_id), None)
    return _over_every_quota(run, team, sorted(pools), cluster)


def _fitting_pools(run: WaitingRun, groups: Iterable[NodeDevices]) -> set[int]:
    """Pools whose devices of one kind could hold the run if all of them were ready and free."""
    sizes = defaultdict[tuple[int, str], list[int]](list)
    for group in groups:
        if run.kind in ("any", group.kind) and run.needs <= group.node.offers:
            sizes[group.node.pool_id, group.kind].append(group.registered)
    return {pool_id for (pool_id, _), registered in sizes.items() if _sizes_suffice(registered, run)}


def _sizes_suffice(sizes: Sequence[int], run: WaitingRun) -> bool:
    if run.nodes is not None:
        return sum(size >= run.devices // run.nodes for size in sizes) >= run.nodes
    return sum(sorted(sizes, reverse=True)[: run.nodes_max]) >= run.devices


def _over_every_quota(run: WaitingRun, team: Team | None, pools: Sequence[int], cluster: ClusterDevices) -> Reason | None:
    quotas = {pool_id: NO_QUOTA if team is None else team.quota(pool_id) for pool_id in pools}
    if team is None or any(quota.limit is None or run.devices <= quota.limit for quota in quotas.values()):
        return None
    pool_id, quota = max(quotas.items(), key=lambda item: (item[1].limit or 0, -item[0]))
    pool = cluster.pool_name(pool_id)
    text = f"Asks for {describe_request(run)}, but team {team.name} may use at most {quota.limit} on pool {pool}: "
    text += f"its quota is {quota.nominal}, and its borrow limit is {quota.borrow_cap}."
    detail = {"pool": pool_id, "quota": quota.nominal, "borrow_cap": quota.borrow_cap, "devices": run.devices}
    return Reason("quota_never", text, detail, None, "Increase the quota or borrow limit, or request fewer devices.")


def _unplaceable(run: WaitingRun, cluster: ClusterDevices) -> Reason:
    """Why no connected node could hold the run, even when empty."""
    nodes = [node for node in cluster.nodes if node.schedulable]
    full = low_on_disk(run, cluster)
    if full and _could_hold(run, [*nodes, *full], cluster) and not _could_hold(run, nodes, cluster):
        text = f"{node_names(full)} {'is' if len(full) == 1 else 'are'} suitable, but low on disk."
        return Reason("disk", text, {"nodes": [node.node_id for node in full]}, None, "Free disk space there.")
    if not nodes and any(node.connected for node in cluster.nodes):
        return Reason("draining", "All connected nodes are draining.", {}, None, "Undrain a node.")
    if not nodes:
        return Reason("no_node", "No worker is connected.", {}, None, "Connect a worker.")
    if run.home is not None and all(node.node_id != run.home[0] for node in nodes):
        return _home_away(run.home, cluster)
    return _infeasible(run, nodes, [b for b in cluster.groups.values() if b.node.schedulable], "connected")


def low_on_disk(run: WaitingRun, cluster: ClusterDevices) -> list[Node]:
    """Nodes that the run could use if they were not low on disk."""
    usable = {b.node.node_id for b in cluster.groups.values() if cluster.low_on_disk and b.size and may_use(run, b)}
    return [node for node in cluster.low_on_disk if node.node_id in usable]


def _could_hold(run: WaitingRun, nodes: Iterable[Node], cluster: ClusterDevices) -> bool:
    ids = {node.node_id for node in nodes}
    return bool(_fitting_pools(run, (b for b in cluster.groups.values() if b.node.node_id in ids and may_use(run, b))))


def node_names(nodes: Sequence[Node]) -> str:
    """`Node a`, `Nodes a, b`."""
    return f"Node{'s' * (len(nodes) > 1)} {', '.join(node.name for node in nodes)}"


def describe_request(run: WaitingRun, model: str = "") -> str:
    """`4 × H100` if all suitable devices are of one model, else `4 cuda devices`."""
    if model:
        return f"{run.devices} × {model}"
    kind = "" if run.kind == "any" else f"{run.kind} "
    return f"{run.devices} {kind}device" + ("s" if run.devices != 1 else "")


def describe_nodes(run: WaitingRun) -> str:
    """The number of nodes that a run needs, as text."""
    if run.nodes is not None:
        return f"{run.nodes} nodes"
    return "one node" if run.nodes_max == 1 else f"at most {run.nodes_max} nodes"


def _home_away(home: tuple[int, str], cluster: ClusterDevices) -> Reason:
    node_id, name = home
    connected = any(node.node_id == node_id and node.connected for node in cluster.nodes)
    why = "is draining" if connected else "is not connected"
    text = f"Its checkpoint is on node {name}, which {why}; storage is not shared."
    return Reason("home_away", text, {"node": node_id}, None, "Bring that node back, or use shared storage.")


def _infeasible(run: WaitingRun, nodes: Sequence[Node], groups: Sequence[NodeDevices], word: str) -> Reason:
    """Why these nodes cannot hold the run; `word`: their common state."""
    for need in sorted(run.needs):
        if all(need not in node.offers for node in nodes):
            text = f"No {word} worker {NEEDS.get(need[0], '{kind} {id}').format(kind=need[0], id=need[1])}."
            return Reason("missing", text, {"kind": need[0], "id": need[1]}, None, "Connect a worker that has it.")
    groups = [b for b in groups if run.needs <= b.node.offers and (run.home is None or run.home[0] == b.node.node_id)]
    if not groups:
        text = f"No single {word} worker has all the models and prompts it needs."
        return Reason("apart", text, {}, None, "Connect a worker that has all of them.")
    allowed = [b for b in groups if b.node.node_id not in run.excluded_nodes]
    names = ", ".join(sorted({b.node.name for b in groups if b not in allowed}))
    if not allowed:
        return Reason("excluded", f"Its retry rules exclude all suitable nodes: {names}.", {}, None, "Add another suitable node.")
    if run.nodes is not None and _fitting_pools(run, groups) and not _fitting_pools(run, allowed):
        text = f"Needs {run.nodes} nodes; its retry rules exclude {names}, and too few other nodes are suitable."
        return Reason("excluded", text, {}, None, "Add another suitable node.")
    return _too_large(run, allowed, word)


def _too_large(run: WaitingRun, groups: Sequence[NodeDevices], word: str) -> Reason:
    fitting = [b for b in groups if run.kind in ("any", b.kind)]
    if not fitting:
        text = f"No suitable {word} node has a {run.kind} device."
        return Reason("kind", text, {"kind": run.kind}, None, "Connect a node that has them.")
    most = max(b.registered for b in fitting)
    detail = {"devices": run.devices, "nodes_max": run.nodes_max, "largest": most}
    if _fitting_pools(run, fitting):
        text = f"Needs {describe_request(run)} on {describe_nodes(run)}, and too many devices are quarantined."
        return Reason("unhealthy", text, detail, None, "Return devices to service.")
    if run.nodes is not None:
        return _too_few(run, fitting, word)
    text = f"Needs {describe_request(run)} on {describe_nodes(run)}; the largest suitable {word} node has {most}."
    sooner = "Request fewer devices" + ("." if run.nodes_max > 1 else ", or allow several nodes.")
    return Reason("too_large", text, detail, None, sooner)


def _too_few(run: WaitingRun, groups: Sequence[NodeDevices], word: str) -> Reason:
    part = run.devices // (run.nodes or 1)
    by_kind = Counter((b.node.pool_id, b.kind) for b in groups if b.registered >= part)
    enough = max(by_kind.values(), default=0)
    devices, verb = "device" + "s" * (part > 1), "node is" if enough == 1 else "nodes are"
    text = f"Needs {describe_nodes(run)} with {part} {devices} each; {enough} {word} {verb} suitable."
    return Reason(
        "too_large", text, {"devices": run.devices, "nodes": run.nodes, "would_do": enough}, None, "Request fewer nodes."
    )
