"""Preemption: the choice of victims for a blocked run.

Victims are preemptible runs past their protected time (`PlanState.may_stop`), in this order of causes: backfilled runs that are
still running at their reservation; runs on devices borrowed by their team; runs of the own team with a lower priority.

Devices that team v has borrowed are reclaimed for team p if p stays within its own quota. Otherwise, to prevent mutual
preemption, all of these must hold:
    borrowed(p, after) ÷ weight(p) < borrowed(v, before) ÷ weight(v), where p counts as taking all devices of the victims, and of
        v's runs with a lower priority that stay: v exchanges them for its victims, which may free more devices;
    share(p, after) < share(v, before);
    v is not reduced below its own quota.
Of the sufficient sets the one with the fewest runs, then the fewest devices, is chosen; it contains no unneeded victim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from oppo_platform.scheduling.policy.placement import Demand, NodeDevices, Place, Selection, select_devices
from oppo_platform.scheduling.policy.plan_state import Holder, PlanState
from oppo_platform.scheduling.policy.quota import Tier
from oppo_platform.scheduling.policy.snapshot import DevicesByNode, RunningRun, WaitingRun


class Cause(IntEnum):
    """Why a run may be preempted; victims with a lower value are chosen first."""

    BACKFILL = 0
    RECLAIM = 1
    PRIORITY = 2


@dataclass(slots=True, eq=False)
class Victim:
    """A run that may be preempted, with its unclaimed devices in this pool by node."""

    run: RunningRun
    cause: Cause
    by_node: dict[NodeDevices, list[int]]
    size: int  # devices in the pool


VictimsByNode = Mapping[NodeDevices, Sequence[Victim]]


@dataclass(slots=True)
class Clearance:
    """Devices for a blocked run, and the victims that release them; none if stopping runs release enough."""

    place: Place
    devices: DevicesByNode
    victims: list[Victim] = field(default_factory=list)

    @property
    def cost(self) -> tuple[int, int, int]:
        return len(self.victims), sum(v.size for v in self.victims), min(self.devices)


def find_victims(run: WaitingRun, demand: Demand, state: PlanState, later: bool = False) -> Clearance | None:
    """The cheapest clearance, with victims if stopping runs do not release enough; None if impossible.

    `later`: among runs in their protected time too.
    """
    searches = [VictimSearch(run, demand, place, state, later) for place in demand.places]
    causes = {victim.cause for search in searches for victim in search.candidates}
    for cause in sorted(causes | {Cause.BACKFILL}):  # another one adds no victim
        clearances = [clearance for search in searches if (clearance := search.cheapest_up_to(cause)) is not None]
        if clearances:
            return min(clearances, key=lambda clearance: clearance.cost)
    return None


class VictimSearch:
    """The candidates for preemption in one place, and the cheapest set of them."""

    def __init__(self, run: WaitingRun, demand: Demand, place: Place, state: PlanState, later: bool) -> None:
        """Collect the candidates."""
        self.run, self.demand, self.place, self.state = run, demand, place, state
        self.account = (run.team_id, place.pool_id)
        self.owed = state.ledger.over_by(self.account, run.devices)
        self.candidates = self._candidates(state.stoppable(place.pool_id, later))

    def _candidates(self, by_team: Mapping[int, Sequence[Holder]]) -> list[Victim]:
        """In the order of their ids."""
        own = sum(held for other, held in by_team.get(self.run.team_id, ()) if other.priority < self.run.priority)
        victims = []
        for team_id, others in by_team.items():
            # Upper bound: as if all runs of the team with a lower priority were stopped. `_allowed` checks the chosen set.
            reclaimable = self.may_reclaim(team_id, 0, 0, own)
            victims += [
                Victim(other, cause, self._freed_devices(other), held)
                for other, held in others
                if (cause := self._cause(other, reclaimable)) is not None
            ]
        return sorted(victims, key=lambda victim: victim.run.run_id)

    def _cause(self, other: RunningRun, reclaimable: bool) -> Cause | None:
        term = other.backfill
        if term is not None and term.for_run_id == self.run.run_id and term.until <= self.state.now:
            return Cause.BACKFILL
        if other.team_id == self.run.team_id:
            return Cause.PRIORITY if other.priority < self.run.priority else None
        return Cause.RECLAIM if reclaimable else None

    def _freed_devices(self, other: RunningRun) -> dict[NodeDevices, list[int]]:
        gains: dict[NodeDevices, list[int]] = {}
        for device_id in (d for ids in other.devices.values() for d in ids if d not in self.state.cluster.claimed):
            group = self.state.cluster.group_of.get(device_id)
            if group is not None:
                gains.setdefault(group, []).append(device_id)
        return gains

    def may_reclaim(self, team_id: int, lost: int, freed: int, own: int) -> bool:
        """Whether the run may reclaim borrowed devices of a team that has lost `lost` devices already.

        `freed`: devices of all victims, `own` of them its own team's. The run counts as taking all of them, since its team may
        take the devices that it does not need.
        """
        ledger, shares = self.state.ledger, self.state.shares
        theirs = ledger.borrowed((team_id, self.place.pool_id), lost)
        tier = ledger.tier(self.account, self.run.devices - own)
        if theirs == 0 or tier is not Tier.BORROWED:
            return theirs > 0 and tier is Tier.OWN
        after = ledger.would_borrow(self.account, max(self.run.devices, freed) - own) / shares.weight(self.run.team_id)
        fairer = shares.share(self.run.team_id, self.run.devices) < shares.share(team_id)
        return fairer and after < theirs / shares.weight(team_id)

    def cheapest_up_to(self, cause: Cause) -> Clearance | None:
        """The cheapest set of victims with causes up to this one, or None."""
        usable = [victim for victim in self.candidates if victim.cause <= cause]
        own = [victim for victim in usable if victim.run.team_id == self.run.team_id]
        if self.owed > sum(victim.size for victim in own):
            return None
        by_node: dict[NodeDevices, list[Victim]] = {}
        for victim in usable:
            for group in victim.by_node:
                by_node.setdefault(group, []).append(victim)
        sets = [chosen for goal in self._goals(by_node) if (chosen := self._choose_victims(goal, by_node, own)) is not None]
        cheapest = min(sets, key=lambda chosen: (len(chosen), sum(v.size for v in chosen)), default=None)
        return None if cheapest is None else self._build_clearance(self._drop_unneeded(cheapest))

    def _goals(self, by_node: VictimsByNode) -> Iterator[Selection]:
        """Nodes, or sets of nodes, that could be cleared, with the number of devices required of each."""

        def reach(group: NodeDevices) -> int:
            return self._open_devices(group) + sum(len(victim.by_node[group]) for victim in by_node.get(group, ()))

        able = [(group, reach(group)) for group in self.place.groups]
        if self.demand.nodes is not None:
            part = self.demand.devices // self.demand.nodes
            near = sorted(
                (b for b, most in able if most >= part), key=lambda b: (max(0, part - self._open_devices(b)), b.node.node_id)
            )
            if len(near) >= self.demand.nodes:
                yield [(group, part) for group in near[: self.demand.nodes]]
            return
        yield from ([(group, self.demand.devices)] for group, most in able if most >= self.demand.devices)
        if self.demand.nodes_max > 1:
            whole = [group for group, most in able if most >= group.size]
            whole.sort(key=lambda b: (b.size - self._open_devices(b), -b.size, b.node.node_id))
            rest, goal = self.demand.devices, []
            for group in whole[: self.demand.nodes_max]:
                goal.append((group, min(rest, group.size)))
                rest -= goal[-1][1]
                if rest == 0:
                    yield goal
                    return

    def _open_devices(self, group: NodeDevices) -> int:
        return len(group.free) + len(group.vacating)

    def _choose_victims(self, goal: Selection, by_node: VictimsByNode, own: Sequence[Victim]) -> list[Victim] | None:
        """Victims until every node of the goal has enough devices and the quota fits; None if there are not enough."""
        chosen: list[Victim] = []
        for group, required in goal:
            here = {victim.run.run_id: len(victim.by_node[group]) for victim in by_node.get(group, ())}
            if not self._choose_until(chosen, by_node.get(group, ()), here, required - self._open_devices(group)):
                return None
        return chosen if self._choose_until(chosen, own, {v.run.run_id: v.size for v in own}, self.owed) else None

    def _choose_until(self, chosen: list[Victim], usable: Sequence[Victim], gains: Mapping[int, int], required: int) -> bool:
        """Add victims to `chosen` until their gains (by run id) reach `required`: the smallest sufficient one, or the largest."""

        def gain(victim: Victim) -> int:
            return gains.get(victim.run.run_id, 0)

        missing = required - sum(map(gain, chosen))
        while missing > 0:
            left = [v for v in usable if v not in chosen]
            enough = sorted((v for v in left if gain(v) >= missing), key=lambda v: (v.cause, v.size, *self._victim_order(v)))
            others = sorted((v for v in left if gain(v) < missing), key=lambda v: (v.cause, -gain(v), *self._victim_order(v)))
            best = next((v for v in (*enough, *others) if self._allowed([*chosen, v])), None)
            if best is None:
                return False
            chosen.append(best)
            missing -= gain(best)
        return True

    def _victim_order(self, victim: Victim) -> tuple[float, int, float, int]:
        """The order of equal victims: largest share of the team, lowest priority, shortest runtime first."""
        return -self.state.shares.share(victim.run.team_id), victim.run.priority, -victim.run.started_at, victim.run.run_id

    def _allowed(self, victims: Sequence[Victim]) -> bool:
        """Whether the rules of reclaiming allow this set."""
        freed, own = sum(v.size for v in victims), self._own_devices(victims)
        entitled = self.state.ledger.tier(self.account, self.run.devices - own) is Tier.OWN
        for team_id in {v.run.team_id for v in victims if v.cause is Cause.RECLAIM}:
            *before, last = [v.size for v in victims if v.run.team_id == team_id]
            if not self.may_reclaim(team_id, sum(before), freed + self._exchangeable(team_id, victims), own):
                return False
            if not entitled and self.state.ledger.borrowed((team_id, self.place.pool_id), sum(before)) < last:
                return False
        return True

    def _exchangeable(self, team_id: int, victims: Sequence[Victim]) -> int:
        """Devices of the preemptible runs of the team, protected or not, that stay and have a lower priority than a victim."""
        chosen = {v.run.run_id: v.run.priority for v in victims if v.run.team_id == team_id}
        others = self.state.stoppable(self.place.pool_id, later=True).get(team_id, ())
        highest = max(chosen.values())
        return sum(held for other, held in others if other.priority < highest and other.run_id not in chosen)

    def _own_devices(self, victims: Sequence[Victim]) -> int:
        """Devices of the run's own team."""
        return sum(v.size for v in victims if v.run.team_id == self.run.team_id)

    def _drop_unneeded(self, chosen: list[Victim]) -> list[Victim]:
        """Remove unneeded victims, the last in order first."""
        for victim in sorted(chosen, key=lambda v: (v.cause, *self._victim_order(v)), reverse=True):
            fewer = [v for v in chosen if v is not victim]
            if self._own_devices(fewer) >= self.owed and self._select(fewer) is not None and self._allowed(fewer):
                chosen = fewer
        return chosen

    def _select(self, victims: Sequence[Victim]) -> Selection | None:
        def amount(group: NodeDevices) -> int:
            return self._open_devices(group) + sum(len(v.by_node.get(group, ())) for v in victims)

        return select_devices(self.place.groups, self.demand, amount)

    def _build_clearance(self, victims: list[Victim]) -> Clearance:
        devices = {}
        for group, count in self._select(victims) or []:
            usable = [*group.free, *sorted(group.vacating), *(d for v in victims for d in v.by_node.get(group, ()))]
            devices[group.node.node_id] = tuple(usable[:count])
        return Clearance(self.place, devices, victims)
