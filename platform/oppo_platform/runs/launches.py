"""Launches: the further nodes of a multi-node attempt, rank 1 and up. The attempt's own row is rank 0, its head.

    the head claims and sends its address → the others are ordered and claim within a deadline → all train

Guarantees: a launch is claimed once, by its node, while its attempt lives and is not stopping. It ends at the latest with its
attempt. Devices of a node that claimed and has not reported the end of its engine become `unknown` until its agent reports them
empty.
Callers hold the locks of run and attempt. Lock order, everywhere: run, attempt, launch, allocation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import QuerySet

from oppo_contract import wire
from oppo_platform import clock
from oppo_platform.cluster.models import Device, DeviceState, Node
from oppo_platform.runs.models import Allocation, Attempt, AttemptState, Launch, LaunchState
from oppo_platform.runs.transitions import AttemptRefused
from oppo_platform.tokens import new_token

WITH_ENGINE = (AttemptState.CLAIMED, AttemptState.RUNNING)


def launches_due() -> QuerySet[Launch]:
    """Launches that their nodes may claim now: the head has joined, and no stop is requested."""
    return Launch.objects.filter(
        state=LaunchState.ALLOCATED, attempt__state__in=WITH_ENGINE, attempt__stop_by__isnull=True, attempt__nodes__gt=1
    )


def create_launches(attempt: Attempt, node_ids: Sequence[int]) -> list[Launch]:
    """Launches for the nodes after the first, in the order of their ranks."""
    return Launch.objects.bulk_create(
        Launch(attempt=attempt, node_id=node_id, rank=rank) for rank, node_id in enumerate(node_ids, start=1)
    )


def head_address(attempt: Attempt, address: wire.Address | None, now: datetime) -> dict[str, object]:
    """The head's address, as fields of the attempt; empty for a single node.

    Raises:
        AttemptRefused: the worker sent none.
    """
    if attempt.nodes == 1:
        return {}
    if address is None:
        raise AttemptRefused("not_your_node", f"Attempt {attempt.pk} spans several nodes, and its first node sent no address.")
    by = now + timedelta(seconds=settings.OPPO_RENDEZVOUS_S)
    return {"rendezvous_host": address.host, "rendezvous_port": address.port, "rendezvous_by": by}


def build_rendezvous(attempt: Attempt, rank: int, now: datetime) -> wire.Rendezvous | None:
    """Rendezvous data of a rank's engine; None for an attempt on one node."""
    if attempt.rendezvous_port is None or attempt.rendezvous_by is None:
        return None
    return wire.Rendezvous(
        nodes=attempt.nodes,
        node_rank=rank,
        address=wire.Address(host=attempt.rendezvous_host, port=attempt.rendezvous_port),
        deadline_s=max(0.0, (attempt.rendezvous_by - now).total_seconds()),
    )


def claim_launch(attempt: Attempt, node: Node, now: datetime) -> tuple[Launch, str]:
    """Assign the launch to its node, once: the launch and its token. Raises `AttemptRefused` otherwise."""
    launch = Launch.objects.select_for_update().filter(attempt=attempt, node=node).first()
    if launch is None:
        raise AttemptRefused("not_your_node", f"Attempt {attempt.pk} is not allocated to node {node.name}.")
    if launch.state != LaunchState.ALLOCATED:
        raise AttemptRefused("already_claimed", f"Rank {launch.rank} of attempt {attempt.pk} is already claimed.")
    if attempt.rendezvous_by is None:
        raise AttemptRefused("not_your_node", f"The first node of attempt {attempt.pk} has not joined yet.")
    if attempt.rendezvous_by <= now or attempt.stop_by is not None:
        raise AttemptRefused("ended", f"Attempt {attempt.pk} no longer accepts nodes.")
    token = new_token("attempt")
    _write(
        launch, LaunchState.ALLOCATED, state=LaunchState.CLAIMED, token_prefix=token.prefix, token_digest=token.digest,
        claimed_at=now, seen_at=now, lease_expires_at=now + timedelta(seconds=settings.OPPO_LEASE_S),
    )  # fmt: skip
    return launch, token.text


def lock_claimed_launch(attempt: Attempt, rank: int) -> Launch:
    """The launch of a rank, locked. Raises `AttemptRefused` when it has ended."""
    launch = Launch.objects.select_for_update(of=("self",)).select_related("node").get(attempt=attempt, rank=rank)
    if launch.state != LaunchState.CLAIMED:
        raise AttemptRefused("ended", f"Rank {rank} of attempt {attempt.pk} has ended ({launch.outcome}).")
    return launch


def renew_launch(launch: Launch, now: datetime, lease_ends: datetime) -> None:
    """A heartbeat of its supervisor."""
    _write(launch, LaunchState.CLAIMED, seen_at=now, lease_expires_at=lease_ends)


def end_launch(launch: Launch, outcome: wire.Outcome) -> None:
    """Its engine has ended without leftover processes: its devices are free."""
    now = clock.now()
    _write(
        launch, LaunchState.CLAIMED, state=LaunchState.ENDED, ended_at=now, outcome=outcome.outcome, exit_code=outcome.exit_code,
        reason=outcome.reason,
    )  # fmt: skip
    held = Allocation.objects.filter(attempt=launch.attempt_id, device__node=launch.node_id, released_at__isnull=True)
    held.update(released_at=now)


def claimed_nodes(attempt: Attempt) -> set[int]:
    """Nodes on which an engine of the attempt is, or may be, running."""
    head = {attempt.node_id} if attempt.state in WITH_ENGINE else set()
    if attempt.nodes == 1:
        return head
    return head | set(attempt.launches.filter(state=LaunchState.CLAIMED).values_list("node_id", flat=True))


def end_launches(attempt: Attempt, silent: Collection[int], now: datetime) -> None:
    """End the launches of an ended attempt; devices of `silent` nodes are not assigned until reported empty."""
    if attempt.nodes == 1:
        return
    attempt.launches.exclude(state=LaunchState.ENDED).update(state=LaunchState.ENDED, ended_at=now)
    held = Device.objects.filter(allocations__attempt=attempt, allocations__released_at__isnull=True, node__in=silent)
    held.exclude(state__in=(DeviceState.GONE, DeviceState.QUARANTINED)).update(state=DeviceState.UNKNOWN)


def _write(launch: Launch, before: LaunchState, **values: object) -> None:
    """A compare-and-set on the state; a trigger also refuses it once the attempt has ended (migration `0004_launches`).

    Raises:
        AttemptRefused: the state is another.
    """
    if not Launch.objects.filter(pk=launch.pk, state=before).update(**values):
        raise AttemptRefused("stale_epoch", f"Rank {launch.rank} of attempt {launch.attempt_id} is no longer {before}.")
    for name, value in values.items():
        setattr(launch, name, value)
