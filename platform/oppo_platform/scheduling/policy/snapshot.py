"""Input and output of the policy: frozen data without a database or a clock.

All instants are POSIX seconds, all durations seconds, all usage GPU-seconds (a CPU device counts like a GPU). Ids are the
database's; the policy only compares them. The order of the tuples does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Need = tuple[str, str]  # ("model" | "prompts", id) as in the nodes' catalogues
DeviceState = Literal["ready", "quarantined", "unknown", "draining"]
# Devices by node id, in the order of the gang: its first node is the rendezvous.
DevicesByNode = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The policy's constants; docs/scheduling.md defines each."""

    half_life_s: float = 7 * 24 * 3600.0
    # Every run counts as at least this long on its devices once it is placed, so that a burst of submissions has no advantage.
    submit_penalty_s: float = 600.0
    # Minimum run time before preemption: doubled after each preemption, up to this factor.
    min_runtime_s: float = 600.0
    most_protection: int = 8
    # Expected time until a stopping run releases its devices: for estimates only.
    stop_s: float = 60.0
    # This many blocked runs per pool, in order, get an estimate and may preempt; the rest gets a reason without an estimate.
    lookahead: int = 50

    def protection_s(self, preempted: int) -> float:
        """Minimum run time of a run that was preempted this often."""
        return self.min_runtime_s * min(1 << preempted, self.most_protection)


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes that are shared under one set of quotas, usually one type of GPU."""

    pool_id: int
    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the one cpu device of a node without GPUs. It can be assigned when it is ready and free."""

    device_id: int
    kind: str  # "cuda" | "cpu"
    model: str = ""
    state: DeviceState = "ready"
    held_by: int | None = None  # run id; a run that is not in `running` holds it until its end is confirmed


@dataclass(frozen=True, slots=True)
class Node:
    """A registered node, also an unreachable one: feasibility is judged on all of them."""

    node_id: int
    name: str
    pool_id: int
    devices: tuple[Device, ...]
    offers: frozenset[Need] = frozenset()
    connected: bool = True
    draining: bool = False
    low_disk: bool = False  # a disk that it writes to is nearly full

    @property
    def schedulable(self) -> bool:
        """Whether a run may be started here now."""
        return self.connected and not self.draining and not self.low_disk


@dataclass(frozen=True, slots=True)
class Quota:
    """A team's devices in a pool: `nominal` is its own, `borrow_cap` limits what it borrows beyond (None: unlimited)."""

    nominal: int = 0
    borrow_cap: int | None = None

    @property
    def limit(self) -> int | None:
        """The most devices that the team may hold; None: no limit."""
        return None if self.borrow_cap is None else self.nominal + self.borrow_cap


# Without a row a team owns nothing and may borrow everything: without any setup all teams share by fair share.
NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class Team:
    """A team: weight in fair sharing, quota by pool id, and its usage decayed to the instant `usage_at`."""

    team_id: int
    name: str
    weight: float = 1.0
    quotas: Mapping[int, Quota] = field(default_factory=dict)
    # Of ended runs, and of running ones up to `usage_at`; the policy adds the use of running runs since.
    usage_gpu_s: float = 0.0
    usage_at: float = 0.0

    def quota(self, pool_id: int) -> Quota:
        """Its quota in a pool."""
        return self.quotas.get(pool_id, NO_QUOTA)


@dataclass(frozen=True, slots=True)
class WaitingRun:
    """A queued run and its request."""

    run_id: int
    team_id: int
    devices: int
    name: str = ""
    user_id: int | None = None
    priority: int = 50  # 1–99, higher goes first, compared within the team only
    nodes_max: int = 1  # a gang may span whole nodes up to this many
    nodes: int | None = None  # exactly this many nodes, with an equal part of the devices on each, whatever `nodes_max` is
    kind: str = "any"  # "any" | "cuda" | "cpu"; kinds are never mixed
    needs: frozenset[Need] = frozenset()
    pools: frozenset[int] | None = None  # only these pools; None: any
    home: tuple[int, str] | None = None  # (id, name) of the node with its checkpoint, if storage is not shared
    submitted_at: float = 0.0  # its place in the queue, kept across preemptions and retries
    queued_at: float = 0.0
    preemptible: bool = True
    max_runtime_s: float | None = None  # enforced by the platform
    steps_left: int | None = None
    steps_per_s: float | None = None  # measured
    excluded_nodes: frozenset[int] = frozenset()  # by its retry rules
    not_before: float | None = None  # retry back-off
    preempted: int = 0  # number of past preemptions

    @property
    def estimate_s(self) -> float | None:
        """Expected duration: remaining steps ÷ measured steps per second, at most its `max_runtime_s`; None: unknown."""
        if not self.steps_per_s or self.steps_left is None:
            return self.max_runtime_s
        measured = self.steps_left / self.steps_per_s
        return measured if self.max_runtime_s is None else min(measured, self.max_runtime_s)


@dataclass(frozen=True, slots=True)
class Backfill:
    """Condition of a run backfilled in front of `for_run_id`: it leaves its devices at `until`."""

    for_run_id: int
    until: float


@dataclass(frozen=True, slots=True)
class RunningRun:
    """A run that holds devices: allocated, starting, running, or `stopping`."""

    run_id: int
    team_id: int
    devices: DevicesByNode
    priority: int = 50
    preemptible: bool = True
    started_at: float = 0.0
    expected_end: float | None = None  # remaining steps ÷ steps per second, or its max_runtime; None: unknown
    stopping: bool = False  # a pause, a cancellation or a preemption is in progress
    backfill: Backfill | None = None  # as it was placed
    preempted: int = 0  # number of past preemptions


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices reserved for a blocked run; `start`: when they are expected to be free (None: unknown).

    `cleared`: others were preempted for it, so it is the next to start, even if shares and priorities have changed.
    """

    run_id: int
    pool_id: int
    devices: DevicesByNode
    start: float | None
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All inputs of a plan besides the instant."""

    pools: tuple[Pool, ...] = ()
    nodes: tuple[Node, ...] = ()
    teams: tuple[Team, ...] = ()
    waiting: tuple[WaitingRun, ...] = ()
    running: tuple[RunningRun, ...] = ()
    # Reservations of the last plan: runs for which others were preempted come first, and the head of the queue keeps its turn
    # although shares have changed.
    reservations: tuple[Reservation, ...] = ()
    settings: PolicySettings = field(default_factory=PolicySettings)


@dataclass(frozen=True, slots=True)
class Placement:
    """These devices are assigned to this run now; with `backfill` it must leave them at that instant."""

    run_id: int
    pool_id: int
    devices: DevicesByNode
    backfill: Backfill | None = None

    @property
    def device_ids(self) -> tuple[int, ...]:
        """All its devices, in the order of its nodes."""
        return tuple(device_id for ids in self.devices.values() for device_id in ids)


@dataclass(frozen=True, slots=True)
class Preemption:
    """Stop this run so that `for_run_id` can start. `code`: reclaim | priority | backfill; `text`: the reason for its owner."""

    run_id: int
    for_run_id: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a run waits. `code` and `detail` are for programs, `text` and `sooner` for people; codes: docs/scheduling.md.

    `text` does not change with time alone, so that it is written only after an event.
    """

    code: str
    text: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    estimated_start: float | None = None
    sooner: str = ""  # what would start it sooner; "" if nothing would


@dataclass(frozen=True, slots=True)
class Decisions:
    """One plan. Every waiting run is either placed or has a reason."""

    placements: tuple[Placement, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    order: tuple[int, ...] = ()  # the waiting runs, in their expected order of starts
