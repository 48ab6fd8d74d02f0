"""The working state of a plan: devices, quotas and shares of the snapshot, and the decisions so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from oppo_platform.scheduling.policy.fair_share import Shares
from oppo_platform.scheduling.policy.placement import UNKNOWN, ClusterDevices, Demand, Place
from oppo_platform.scheduling.policy.quota import Ledger, Tier
from oppo_platform.scheduling.policy.snapshot import (
    Backfill,
    DevicesByNode,
    Placement,
    Preemption,
    Reservation,
    RunningRun,
    Snapshot,
    WaitingRun,
)

Holder = tuple[RunningRun, int]  # with the number of its devices in a pool


@dataclass(slots=True)
class Blocked:
    """A run that keeps waiting. `cause` is a code of docs/scheduling.md; `start` is the estimate (`UNKNOWN`: none)."""

    run: WaitingRun
    demand: Demand
    cause: str
    start: float = UNKNOWN
    place: Place | None = None
    victims: tuple[RunningRun, ...] = ()

    @property
    def estimated_start(self) -> float | None:
        return None if self.start == UNKNOWN else self.start


@dataclass(frozen=True, slots=True)
class Ranked:
    """The tiers of a demand's places for a team, best first, and its places up to each tier.

    `changes`: the team's `Ledger.changes` when this was computed.
    """

    changes: int
    tiers: list[Tier]
    places: dict[Tier, list[Place]]


@dataclass(slots=True)
class PlanState:
    """Built from a snapshot, updated by each decision."""

    snapshot: Snapshot
    now: float
    cluster: ClusterDevices = field(init=False)
    ledger: Ledger = field(init=False)
    shares: Shares = field(init=False)
    placements: list[Placement] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    blocked: list[Blocked] = field(default_factory=list)
    rest: list[WaitingRun] = field(default_factory=list)  # blocked runs behind these, which are ordered and explained only
    examined: Counter[int] = field(default_factory=Counter)  # blocked runs by pool
    heads: dict[int, int] = field(default_factory=dict)  # pool → the blocked run with a reservation
    # (team, demand, priority) without possible victims.
    unpreemptable: set[tuple[int, int, int]] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)  # victims of this plan
    # Blocked run → its possible victims after their protected time; and the ids of all of these.
    protected_victims: dict[int, tuple[RunningRun, ...]] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    team_of: dict[int, int] = field(default_factory=dict)  # runs with a reservation
    _running: dict[int, list[Holder]] = field(default_factory=dict)  # by pool
    _stoppable: dict[tuple[int, bool], tuple[tuple[int, int], dict[int, list[Holder]]]] = field(default_factory=dict)
    _ranks: dict[tuple[int, Demand], Ranked] = field(default_factory=dict)  # by team and demand

    def __post_init__(self) -> None:
        self.cluster = ClusterDevices(self.snapshot, self.now)
        self.ledger = Ledger(self.snapshot)
        self.shares = Shares(self.snapshot, self.now)
        for run in sorted(self.snapshot.running, key=lambda r: r.run_id):
            for pool_id, held in self.ledger.devices_by_pool(run.devices).items():
                self._running.setdefault(pool_id, []).append((run, held))

    def team_name(self, team_id: int) -> str:
        """The team's name, or its id."""
        return next((team.name for team in self.snapshot.teams if team.team_id == team_id), str(team_id))

    def running(self, pool_id: int) -> list[Holder]:
        """The runs that hold devices of the pool, by id."""
        return self._running.get(pool_id, [])

    def stoppable(self, pool_id: int, later: bool) -> dict[int, list[Holder]]:
        """By team, the runs that hold devices of the pool and may be preempted: now, or also after their protected time.

        In the order of their ids; computed again once a run was preempted or is awaited.
        """
        key, version = (pool_id, later), (len(self.leaving), len(self.awaited))
        known = self._stoppable.get(key)
        if known is None or known[0] != version:
            by_team: dict[int, list[Holder]] = {}
            may_stop = self.may_stop_later if later else self.may_stop
            for run, held in self.running(pool_id):
                if may_stop(run):
                    by_team.setdefault(run.team_id, []).append((run, held))
            known = self._stoppable[key] = version, by_team
        return known[1]

    def may_stop(self, run: RunningRun) -> bool:
        """Whether the run can be preempted now: it is preemptible, not stopping, and its protected time has passed."""
        return self.protected_until(run) <= self.now and self._is_preemptible(run)

    def may_stop_later(self, run: RunningRun) -> bool:
        """Whether it can be preempted after its protected time, and no other blocked run waits for that."""
        return self._is_preemptible(run) and run.run_id not in self.awaited

    def _is_preemptible(self, run: RunningRun) -> bool:
        return run.preemptible and not run.stopping and run.run_id not in self.leaving

    def protected_until(self, run: RunningRun) -> float:
        """The end of the run's protected time."""
        return run.started_at + self.snapshot.settings.protection_s(run.preempted)

    def tiers(self, run: WaitingRun) -> list[Tier]:
        """The tiers of its places, best first; `OVER` only if there is no other."""
        return self._ranked(run).tiers

    def options(self, run: WaitingRun, worst: Tier = Tier.BORROWED) -> list[Place]:
        """Its places up to a tier: own before borrowed, GPUs before CPUs, then by pool."""
        return self._ranked(run).places[worst]

    def _ranked(self, run: WaitingRun) -> Ranked:
        """The run's places by its team's quota; computed once for equal requests of a team until its use changes."""
        demand = self.cluster.demand(run)
        changes, known = self.ledger.changes[run.team_id], self._ranks.get((run.team_id, demand))
        if known is None or known.changes != changes:
            by_tier = [(self.ledger.tier((run.team_id, place.pool_id), run.devices), place) for place in demand.places]
            by_tier.sort(key=lambda entry: entry[0])
            tiers = sorted({tier for tier, _ in by_tier} - {Tier.OVER}) or [Tier.OVER]
            places = {worst: [place for tier, place in by_tier if tier <= worst] for worst in Tier}
            known = self._ranks[run.team_id, demand] = Ranked(changes, tiers, places)
        return known

    def place(self, run: WaitingRun, place: Place, devices: DevicesByNode, backfill: Backfill | None = None) -> None:
        """Allocate the devices to the run."""
        estimate = run.estimate_s
        self.cluster.take(devices, UNKNOWN if estimate is None else self.now + estimate)
        self.ledger.add(run.team_id, devices)
        self.shares.charge(run.team_id, run.devices)
        self.placements.append(Placement(run.run_id, place.pool_id, devices, backfill))

    def reserve(self, run: WaitingRun, place: Place, devices: DevicesByNode, start: float, cleared: bool = False) -> None:
        """Reserve devices and quota for a blocked run from `start` on; `cleared`: other runs were preempted for it."""
        reservation = Reservation(run.run_id, place.pool_id, devices, None if start == UNKNOWN else start, cleared)
        self.cluster.reserve_devices(reservation, self.end(run, start))
        self.ledger.promise((run.team_id, place.pool_id), run.devices, start)
        self.reservations.append(reservation)
        self.team_of[run.run_id] = run.team_id

    def reserved_before(self, run: WaitingRun) -> frozenset[int]:
        """Its devices in the last plan's reservation."""
        reserved = (r.devices for r in self.snapshot.reservations if r.run_id == run.run_id)
        return frozenset(device_id for devices in reserved for ids in devices.values() for device_id in ids)

    def quota_from(self, run: WaitingRun, pool_id: int) -> float:
        """The instant at which enough runs of its team are expected to have ended for its quota there."""
        account = (run.team_id, pool_id)
        limit, held = self.ledger.limit(account), self.ledger.used[account] + self.ledger.promised[account]
        if limit is None or held + run.devices <= limit:
            return self.now
        ends = [(self.cluster.end(other), devices) for other, devices in self.running(pool_id) if other.team_id == run.team_id]
        for end, devices in sorted(ends):
            held -= devices
            if held + run.devices <= limit:
                return end
        return UNKNOWN

    def end(self, run: WaitingRun, start: float) -> float:
        """The expected end of a run that starts at `start`."""
        return UNKNOWN if run.estimate_s is None else start + run.estimate_s

    def stop(self, victim: RunningRun, for_run: WaitingRun, code: str, text: str) -> None:
        """Preempt a running run."""
        self.leaving.add(victim.run_id)
        self.ledger.leave(victim.team_id, victim.devices)
        self.preemptions.append(Preemption(victim.run_id, for_run.run_id, code, text))
