"""Input and output of the policy: frozen dataclasses without database or clock.

Instants are POSIX seconds, durations seconds, usage GPU-seconds (a CPU device counts as a GPU). Ids are the database's. The order
of the tuples does not change a plan.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Need = tuple[str, str]  # ("model" | "prompts" | "hub", id) as in the nodes' catalogues
DeviceState = Literal["ready", "quarantined", "unknown", "draining"]
# Devices by node id, in the order of the gang: its first node is the rendezvous.
DevicesByNode = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The policy's constants; docs/scheduling.md defines each."""

    half_life_s: float = 7 * 24 * 3600.0
    # A placed run counts as at least this long on its devices, so that a burst of submissions gains nothing.
    submit_penalty_s: float = 600.0
    # Protection from preemption after the start; it doubles with each preemption, up to this factor.
    min_runtime_s: float = 600.0
    most_protection: int = 8
    # Expected time of a stopping run on its devices, for estimates.
    stop_s: float = 60.0
    # Blocked runs per pool that get an estimate and may preempt.
    lookahead: int = 50

    def protection_s(self, preempted: int) -> float:
        """Seconds of protection after the start of a run with this many preemptions."""
        return self.min_runtime_s * min(1 << preempted, self.most_protection)


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes that are shared under one set of quotas, usually one type of GPU."""

    pool_id: int
    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the one cpu device of a node without GPUs. It is allocatable if it is ready and not held."""

    device_id: int
    kind: str  # "cuda" | "cpu"
    model: str = ""
    state: DeviceState = "ready"
    held_by: int | None = None  # run id; a run that is not in `running` holds it until its end is confirmed


@dataclass(frozen=True, slots=True)
class Node:
    """A registered node, connected or not."""

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
        """Whether a run may start here now."""
        return self.connected and not self.draining and not self.low_disk


@dataclass(frozen=True, slots=True)
class Quota:
    """A team's devices in a pool: `nominal` guaranteed ones, and at most `borrow_cap` more (None: no limit)."""

    nominal: int = 0
    borrow_cap: int | None = None

    @property
    def limit(self) -> int | None:
        """The maximum of devices; None: no limit."""
        return None if self.borrow_cap is None else self.nominal + self.borrow_cap


# A team without a quota borrows without limit: fair share alone decides.
NO_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class Team:
    """A team: fair-share weight, quota by pool id, and usage decayed to the instant `usage_at`."""

    team_id: int
    name: str
    weight: float = 1.0
    quotas: Mapping[int, Quota] = field(default_factory=dict)
    # Up to `usage_at`; the policy adds the later usage of running runs.
    usage_gpu_s: float = 0.0
    usage_at: float = 0.0

    def quota(self, pool_id: int) -> Quota:
        return self.quotas.get(pool_id, NO_QUOTA)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What decides where a run fits. Equal requests are one object, so that a plan handles thousands of runs by request."""

    devices: int
    nodes_max: int
    nodes: int | None
    kind: str
    needs: frozenset[Need]
    home: tuple[int, str] | None
    excluded_nodes: frozenset[int]


_request = functools.lru_cache(maxsize=4096)(Request)  # few differ; a second object for a dropped request costs time only


@dataclass(frozen=True, slots=True)
class WaitingRun:
    """A queued run and its request."""

    run_id: int
    team_id: int
    devices: int
    priority: int = 50  # 1–99, higher first, within the team only
    nodes_max: int = 1  # maximum of whole nodes for a gang
    nodes: int | None = None  # exact number of nodes, with an equal part of the devices on each; overrides `nodes_max`
    kind: str = "any"  # "any" | "cuda" | "cpu"; kinds are never mixed
    needs: frozenset[Need] = frozenset()
    home: tuple[int, str] | None = None  # (id, name) of the node with its checkpoint, when storage is not shared
    submitted_at: float = 0.0  # its position in the queue, unchanged by requeuing
    preemptible: bool = True
    max_runtime_s: float | None = None  # enforced
    steps_left: int | None = None
    steps_per_s: float | None = None  # measured
    excluded_nodes: frozenset[int] = frozenset()  # by its retry rules
    not_before: float | None = None  # retry back-off
    preempted: int = 0  # number of preemptions
    request: Request = field(init=False, repr=False, compare=False)
    # Expected runtime: steps left ÷ measured steps per second, at most `max_runtime_s`; None: unknown.
    estimate_s: float | None = field(init=False, repr=False, compare=False)
    place_in_team: tuple[int, float, int] = field(init=False, repr=False, compare=False)  # ascending: the next run first

    def __post_init__(self) -> None:
        request = _request(self.devices, self.nodes_max, self.nodes, self.kind, self.needs, self.home, self.excluded_nodes)
        object.__setattr__(self, "request", request)
        object.__setattr__(self, "estimate_s", self._estimate_s())
        object.__setattr__(self, "place_in_team", (-self.priority, self.submitted_at, self.run_id))

    def _estimate_s(self) -> float | None:
        if not self.steps_per_s or self.steps_left is None:
            return self.max_runtime_s
        measured = self.steps_left / self.steps_per_s
        return measured if self.max_runtime_s is None else min(measured, self.max_runtime_s)


@dataclass(frozen=True, slots=True)
class Backfill:
    """The condition of a backfilled run: it releases its devices for `for_run_id` at `until`."""

    for_run_id: int
    until: float


@dataclass(frozen=True, slots=True)
class RunningRun:
    """A run that holds devices: allocated, starting, running, or stopping."""

    run_id: int
    team_id: int
    devices: DevicesByNode
    priority: int = 50
    preemptible: bool = True
    started_at: float = 0.0
    expected_end: float | None = None  # steps left ÷ steps per second, or its max_runtime; None: unknown
    stopping: bool = False  # being paused, cancelled or preempted
    backfill: Backfill | None = None
    preempted: int = 0  # number of preemptions


@dataclass(frozen=True, slots=True)
class Reservation:
    """Devices reserved for a blocked run; `start`: when they are expected to be free (None: unknown).

    `cleared`: other runs were preempted for it, so it starts next, regardless of shares and priorities.
    """

    run_id: int
    pool_id: int
    devices: DevicesByNode
    start: float | None
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The input of a plan besides the instant."""

    pools: tuple[Pool, ...] = ()
    nodes: tuple[Node, ...] = ()
    teams: tuple[Team, ...] = ()
    waiting: tuple[WaitingRun, ...] = ()
    running: tuple[RunningRun, ...] = ()
    # Of the last plan: runs with preempted victims come first, and a head keeps its turn although shares have changed.
    reservations: tuple[Reservation, ...] = ()
    settings: PolicySettings = field(default_factory=PolicySettings)


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices for a run, now; with `backfill` it must release them at that instant."""

    run_id: int
    pool_id: int
    devices: DevicesByNode
    backfill: Backfill | None = None

    @property
    def device_ids(self) -> tuple[int, ...]:
        """All its devices, by node."""
        return tuple(device_id for ids in self.devices.values() for device_id in ids)


@dataclass(frozen=True, slots=True)
class Preemption:
    """A run to stop so that `for_run_id` can start. `code`: reclaim | priority | backfill; `text`: the reason for its owner."""

    run_id: int
    for_run_id: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a run waits. `code` and `detail` are for programs, `text` and `sooner` for people; codes: docs/scheduling.md.

    `text` does not contain times or durations, so that the row is only written after a change of state.
    """

    code: str
    text: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    estimated_start: float | None = None
    sooner: str = ""  # a change that would start it sooner, if any


@dataclass(frozen=True, slots=True)
class Decisions:
    """One plan. Every waiting run is either placed or has a reason."""

    placements: tuple[Placement, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    order: tuple[int, ...] = ()  # the remaining runs in their expected starting order
