"""Hard feasibility: runs that cannot start now whatever else runs, and runs that can never start.

`partition` sets such runs aside before anything is assigned: they wait with a reason and block no other run. `infeasible_reason`
judges a request on every registered node, also unreachable, draining or with failed devices, and on its team's quota: the answer
at
submit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from oppo_platform.scheduling.policy.placement import ClusterDevices, NodeDevices
from oppo_platform.scheduling.policy.snapshot import NO_QUOTA, Node, Reason, Snapshot, Team, WaitingRun
from oppo_platform.scheduling.policy.text import describe_request, nodes_allowed

KINDS_OF_NEED = {"model": "the model", "prompts": "the prompts"}


def partition(
    waiting: Iterable[WaitingRun], room: ClusterDevices, teams: Iterable[Team], now: float
) -> tuple[list[WaitingRun], dict[int, Reason]]:
    """Runs that could start on an empty cluster, and the reasons of the others."""
    by_id = {team.team_id: team for team in teams}
    eligible, hopeless = list[WaitingRun](), dict[int, Reason]()
    for run in waiting:
        if run.not_before is not None and run.not_before > now:
            hopeless[run.run_id] = _pausing(run)
        elif not (places := room.demand(run).places):
            hopeless[run.run_id] = _not_now(run, room)
        elif refusal := _over_every_quota(run, by_id.get(run.team_id), [place.pool_id for place in places], room):
            hopeless[run.run_id] = refusal
        else:
            eligible.append(run)
    return eligible, hopeless


def infeasible_reason(run: WaitingRun, snapshot: Snapshot, room: ClusterDevices) -> Reason | None:
    """Why all registered nodes together, or the team's quota, cannot satisfy the request; None if they can."""
    pools = {n.pool_id for n in room.nodes if _large_enough(run, [b for b in room.bins.values() if b.node.pool_id == n.pool_id])}
    if not pools:
        return _why(run, room.nodes, list(room.bins.values()), "registered")
    team = next((team for team in snapshot.teams if team.team_id == run.team_id), None)
    return _over_every_quota(run, team, sorted(pools), room)


def _large_enough(run: WaitingRun, bins: Sequence[NodeDevices]) -> bool:
    """Whether bins of one pool could hold it if all their devices were in order and free."""
    kinds = {each.kind for each in bins}
    able = [each for each in bins if _may_read(run, each.node) and run.kind in ("any", each.kind)]
    able = [each for each in able if run.pools is None or each.node.pool_id in run.pools]
    return any(_spread([b.registered for b in able if b.kind == kind], run) for kind in kinds)


def _spread(sizes: Sequence[int], run: WaitingRun) -> bool:
    if run.nodes is not None:
        return sum(size >= run.devices // run.nodes for size in sizes) >= run.nodes
    return sum(sorted(sizes, reverse=True)[: run.nodes_max]) >= run.devices


def _may_read(run: WaitingRun, node: Node) -> bool:
    return run.needs <= node.offers


def _pausing(run: WaitingRun) -> Reason:
    text = "Waits before the next attempt, because the last one failed."
    return Reason("backoff", text, {"not_before": run.not_before}, run.not_before)


def _over_every_quota(run: WaitingRun, team: Team | None, pools: Sequence[int], room: ClusterDevices) -> Reason | None:
    quotas = {pool_id: NO_QUOTA if team is None else team.quota(pool_id) for pool_id in pools}
    if team is None or any(quota.limit is None or run.devices <= quota.limit for quota in quotas.values()):
        return None
    pool_id, quota = max(quotas.items(), key=lambda item: (item[1].limit or 0, -item[0]))
    text = (
        f"Asks for {describe_request(run)}, but team {team.name} may use at most {quota.limit} on pool"
        f" {room.pool_name(pool_id)}: "
        f"its quota is {quota.nominal}, and its borrow limit is {quota.borrow_cap}."
    )
    detail = {"pool": pool_id, "quota": quota.nominal, "borrow_cap": quota.borrow_cap, "devices": run.devices}
    return Reason("quota_never", text, detail, None, "Increase the quota or borrow limit, or request fewer devices.")


def _not_now(run: WaitingRun, room: ClusterDevices) -> Reason:
    """Why no node could take it now, even an empty one."""
    nodes = [node for node in room.nodes if node.schedulable]
    full = low_on_disk(run, room)
    if full and _are_suitable(run, [*nodes, *full], room) and not _are_suitable(run, nodes, room):
        text = f"{names_of(full)} {'is' if len(full) == 1 else 'are'} suitable, but low on disk."
        return Reason("disk", text, {"nodes": [node.node_id for node in full]}, None, "Free disk space there.")
    if not nodes and any(node.connected for node in room.nodes):
        return Reason("draining", "All connected nodes are draining.", {}, None, "Undrain a node.")
    if not nodes:
        return Reason("no_node", "No worker is connected.", {}, None, "Connect a worker.")
    if run.home is not None and all(node.node_id != run.home[0] for node in nodes):
        return _checkpoint_node_away(run.home, room)
    return _why(run, nodes, [b for b in room.bins.values() if b.node.schedulable], "connected")


def low_on_disk(run: WaitingRun, room: ClusterDevices) -> list[Node]:
    """Suitable nodes that are excluded only because of low disk space."""
    if not room.low_on_disk:
        return []
    usable = {b.node.node_id for b in room.bins.values() if b.size and run.kind in ("any", b.kind) and _may_read(run, b.node)}
    usable -= run.excluded_nodes
    if run.home is not None:
        usable &= {run.home[0]}
    return [node for node in room.low_on_disk if node.node_id in usable]


def _are_suitable(run: WaitingRun, nodes: Sequence[Node], room: ClusterDevices) -> bool:
    """Whether these nodes, if empty, could hold the run."""
    ids = {node.node_id for node in nodes if run.home is None or run.home[0] == node.node_id}
    bins = [b for b in room.bins.values() if b.node.node_id in ids and b.node.node_id not in run.excluded_nodes]
    return any(_large_enough(run, [b for b in bins if b.node.pool_id == pool]) for pool in {b.node.pool_id for b in bins})


def names_of(nodes: Sequence[Node]) -> str:
    """`Node a`, `Nodes a, b`."""
    return f"Node{'s' * (len(nodes) > 1)} {', '.join(node.name for node in nodes)}"


def _checkpoint_node_away(home: tuple[int, str], room: ClusterDevices) -> Reason:
    node_id, name = home
    connected = any(node.node_id == node_id and node.connected for node in room.nodes)
    why = "is draining" if connected else "is not connected"
    text = f"Its checkpoint is on node {name}, which {why}; storage is not shared."
    return Reason("home_away", text, {"node": node_id}, None, "Bring that node back, or use shared storage.")


def _why(run: WaitingRun, nodes: Sequence[Node], bins: Sequence[NodeDevices], word: str) -> Reason:
    """Why none of these nodes is suitable; `word` says what they have in common."""
    for need in sorted(run.needs):
        if all(need not in node.offers for node in nodes):
            text = f"No {word} worker has {KINDS_OF_NEED.get(need[0], need[0])} {need[1]}."
            return Reason("missing", text, {"kind": need[0], "id": need[1]}, None, "Connect a worker that has it.")
    bins = [b for b in bins if _may_read(run, b.node) and (run.home is None or run.home[0] == b.node.node_id)]
    if not bins:
        text = f"No single {word} worker has all the models and prompts it needs."
        return Reason("apart", text, {}, None, "Connect a worker that has all of them.")
    allowed = [b for b in bins if b.node.node_id not in run.excluded_nodes]
    names = ", ".join(sorted({b.node.name for b in bins if b not in allowed}))
    if not allowed:
        return Reason("excluded", f"Its retry rules exclude all suitable nodes: {names}.", {}, None, "Add another suitable node.")
    if run.nodes is not None and _fits_into(run, bins) and not _fits_into(run, allowed):
        text = f"Needs {run.nodes} nodes; its retry rules exclude {names}, and too few other nodes are suitable."
        return Reason("excluded", text, {}, None, "Add another suitable node.")
    return _too_large(run, allowed, word)


def _fits_into(run: WaitingRun, bins: Sequence[NodeDevices]) -> bool:
    """Whether bins of one pool and kind could hold it if all their devices were in order and free."""
    by_group: dict[tuple[int, str], list[int]] = {}
    for each in bins:
        if run.kind in ("any", each.kind) and (run.pools is None or each.node.pool_id in run.pools):
            by_group.setdefault((each.node.pool_id, each.kind), []).append(each.registered)
    return any(_spread(sizes, run) for sizes in by_group.values())


def _too_large(run: WaitingRun, bins: Sequence[NodeDevices], word: str) -> Reason:
    fitting = [b for b in bins if run.kind in ("any", b.kind) and (run.pools is None or b.node.pool_id in run.pools)]
    if not fitting:
        text = f"No suitable {word} node has {'a ' + run.kind + ' device' if run.kind != 'any' else 'devices in its pools'}."
        return Reason("kind", text, {"kind": run.kind}, None, "Connect a node that has them.")
    most = max(b.registered for b in fitting)
    detail = {"devices": run.devices, "nodes_max": run.nodes_max, "largest": most}
    if _fits_into(run, fitting):
        text = f"Needs {describe_request(run)} on {nodes_allowed(run)}, and too many devices are quarantined."
        return Reason("unhealthy", text, detail, None, "Return devices to service.")
    if run.nodes is not None:
        return _too_few(run, fitting, word)
    text = f"Needs {describe_request(run)} on {nodes_allowed(run)}; the largest suitable {word} node has {most}."
    sooner = "Request fewer devices" + ("." if run.nodes_max > 1 else ", or allow several nodes.")
    return Reason("too_large", text, detail, None, sooner)


def _too_few(run: WaitingRun, bins: Sequence[NodeDevices], word: str) -> Reason:
    """Too few nodes for a run that asks for a number of them."""
    part = run.devices // (run.nodes or 1)
    by_kind = Counter((b.node.pool_id, b.kind) for b in bins if b.registered >= part)
    enough = max(by_kind.values(), default=0)
    each, ones = "device" + "s" * (part > 1), "node is" if enough == 1 else "nodes are"
    text = f"Needs {nodes_allowed(run)} with {part} {each} each; {enough} {word} {ones} suitable."
    return Reason(
        "too_large", text, {"devices": run.devices, "nodes": run.nodes, "would_do": enough}, None, "Request fewer nodes."
    )
