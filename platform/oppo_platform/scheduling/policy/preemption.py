"""Preemption: selects runs to stop so that a blocked run can start.

Only preemptible runs that have run for their minimum time, which doubles with each preemption, in this order: a backfilled run
that is still on the devices at the reservation it passed; runs of teams that use borrowed devices; runs of the own team with a
lower priority.

Devices that team v has borrowed are reclaimed for team p if p stays within its own quota; or, so that teams do not preempt each
other in turn, if all of these hold:
    borrowed(p, after) ÷ weight(p) < borrowed(v, before) ÷ weight(v), where p counts as taking all that the victims leave;
    share(p, after) < share(v, before);
    v keeps its own quota: a borrower takes nothing of it.
Of the sufficient sets that the search finds, the one with the fewest runs, then the fewest devices, is taken; none of it can be
spared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from oppo_platform.scheduling.policy.placement import Cut, Demand, NodeDevices, Place, cut
from oppo_platform.scheduling.policy.plan_state import PlanState
from oppo_platform.scheduling.policy.quota import Tier
from oppo_platform.scheduling.policy.snapshot import DevicesByNode, RunningRun, WaitingRun


class Cause(IntEnum):
    """Why a run may be stopped; the lower goes first."""

    BACKFILL = 0
    RECLAIM = 1
    PRIORITY = 2


@dataclass(slots=True, eq=False)
class Victim:
    """A run that may be stopped: its devices in this pool, by bin, without those reserved by other runs."""

    run: RunningRun
    cause: Cause
    by_bin: dict[NodeDevices, list[int]]
    size: int  # devices in the pool


ByBin = Mapping[NodeDevices, Sequence[Victim]]
MayStop = Callable[[RunningRun], bool]


@dataclass(slots=True)
class Cleared:
    """Room for a blocked run: its devices, and the runs to stop (none if stopping runs leave enough)."""

    place: Place
    devices: DevicesByNode
    victims: list[Victim] = field(default_factory=list)

    @property
    def cost(self) -> tuple[int, int, int]:
        """Fewest runs, then fewest devices, then the first node."""
        return len(self.victims), sum(v.size for v in self.victims), min(self.devices)


def make_room(run: WaitingRun, demand: Demand, board: PlanState, may_stop: MayStop) -> Cleared | None:
    """The cheapest way to make room by preemption, or by waiting for stopping runs; None if there is none."""
    searches = [Search(run, demand, place, board, may_stop) for place in demand.places]
    for cause in Cause:
        result = [cleared for search in searches if (cleared := search.upto(cause)) is not None]
        if result:
            return min(result, key=lambda cleared: cleared.cost)
    return None


class Search:
    """For one run and one place: possible victims, and the cheapest set of them."""

    def __init__(self, run: WaitingRun, demand: Demand, place: Place, board: PlanState, may_stop: MayStop) -> None:
        """Collect the candidates among those that `may_stop` allows."""
        self.run, self.demand, self.place, self.board = run, demand, place, board
        self.account = (run.team_id, place.pool_id)
        self.owed = board.ledger.over_by(self.account, run.devices)
        self.candidates = self._candidates(may_stop)

    def _candidates(self, may_stop: MayStop) -> list[Victim]:
        others = [other for other in self.board.running(self.place.pool_id) if may_stop(other)]
        lower = [o for o in others if o.team_id == self.run.team_id and o.priority < self.run.priority]
        own = sum(self.board.ledger.by_pool(other.devices)[self.place.pool_id] for other in lower)
        # Upper bound, as if all lower priorities of its team were stopped; the chosen set is judged exactly.
        reclaimable = {team_id for team_id in {other.team_id for other in others} if self.may_reclaim(team_id, 0, 0, own)}
        return [
            Victim(other, cause, self._gains(other), self.board.ledger.by_pool(other.devices)[self.place.pool_id])
            for other in others
            if (cause := self._cause(other, other.team_id in reclaimable)) is not None
        ]

    def _cause(self, other: RunningRun, reclaimable: bool) -> Cause | None:
        deal = other.backfill
        if deal is not None and deal.for_run_id == self.run.run_id and deal.until <= self.board.now:
            return Cause.BACKFILL
        if other.team_id == self.run.team_id:
            return Cause.PRIORITY if other.priority < self.run.priority else None
        return Cause.RECLAIM if reclaimable else None

    def _gains(self, other: RunningRun) -> dict[NodeDevices, list[int]]:
        gains: dict[NodeDevices, list[int]] = {}
        for device_id in (d for ids in other.devices.values() for d in ids if d not in self.board.room.claimed):
            each = self.board.room.node_devices(device_id)
            if each is not None:
                gains.setdefault(each, []).append(device_id)
        return gains

    def may_reclaim(self, team_id: int, lost: int, freed: int, own: int) -> bool:
        """Whether a team that loses `lost` devices already has borrowed devices that this run may have.

        `freed`: devices that all victims together leave, `own` of them its own team's. The run's team may also
        take the rest, so it
        counts as taking all.
        """
        ledger, shares = self.board.ledger, self.board.shares
        theirs = ledger.borrowed((team_id, self.place.pool_id), lost)
        tier = ledger.tier(self.account, self.run.devices - own)
        if theirs == 0 or tier is not Tier.BORROWED:
            return theirs > 0 and tier is Tier.OWN
        after = ledger.would_borrow(self.account, max(self.run.devices, freed) - own) / shares.weight(self.run.team_id)
        fairer = shares.of(self.run.team_id, self.run.devices) < shares.of(team_id)
        return fairer and after < theirs / shares.weight(team_id)

    def upto(self, cause: Cause) -> Cleared | None:
        """The cheapest set of victims with causes up to this one; None if there is none."""
        usable = [victim for victim in self.candidates if victim.cause <= cause]
        own = [victim for victim in usable if victim.run.team_id == self.run.team_id]
        if self.owed > sum(victim.size for victim in own):
            return None
        by_bin: dict[NodeDevices, list[Victim]] = {}
        for victim in usable:
            for each in victim.by_bin:
                by_bin.setdefault(each, []).append(victim)
        sets = [result for goal in self._goals(by_bin) if (result := self._gather(goal, by_bin, own)) is not None]
        cheapest = min(sets, key=lambda chosen: (len(chosen), sum(v.size for v in chosen)), default=None)
        return None if cheapest is None else self._cleared(self._spare(cheapest))

    def _goals(self, by_bin: ByBin) -> Iterator[Cut]:
        """Bins, or the set of whole nodes, that could be cleared, each with the devices required of it."""

        def reach(each: NodeDevices) -> int:
            return self._open(each) + sum(len(victim.by_bin[each]) for victim in by_bin.get(each, ()))

        able = [(each, reach(each)) for each in self.place.bins]
        if self.demand.nodes is not None:
            part = self.demand.devices // self.demand.nodes
            near = sorted((b for b, most in able if most >= part), key=lambda b: (max(0, part - self._open(b)), b.node.node_id))
            if len(near) >= self.demand.nodes:
                yield [(each, part) for each in near[: self.demand.nodes]]
            return
        yield from ([(each, self.demand.devices)] for each, most in able if most >= self.demand.devices)
        if self.demand.nodes_max > 1:
            whole = [each for each, most in able if most >= each.size]
            whole.sort(key=lambda b: (b.size - self._open(b), -b.size, b.node.node_id))
            rest, goal = self.demand.devices, []
            for each in whole[: self.demand.nodes_max]:
                goal.append((each, min(rest, each.size)))
                rest -= goal[-1][1]
                if rest == 0:
                    yield goal
                    return

    def _open(self, each: NodeDevices) -> int:
        return len(each.free) + len(each.soon)

    def _gather(self, goal: Cut, by_bin: ByBin, own: Sequence[Victim]) -> list[Victim] | None:
        """Victims, best first, until every bin of the goal has enough and the quota fits; None if there are not enough."""
        chosen: list[Victim] = []
        for each, wanted in goal:
            here = {victim.run.run_id: len(victim.by_bin[each]) for victim in by_bin.get(each, ())}
            if not self._add(chosen, by_bin.get(each, ()), here, wanted - self._open(each)):
                return None
        return chosen if self._add(chosen, own, {v.run.run_id: v.size for v in own}, self.owed) else None

    def _add(self, chosen: list[Victim], usable: Sequence[Victim], gains: Mapping[int, int], wanted: int) -> bool:
        """Add victims until the gains (by run id) of all chosen reach `wanted`.

        The smallest single victim that is enough, otherwise the one with the largest gain.
        """

        def gain(victim: Victim) -> int:
            return gains.get(victim.run.run_id, 0)

        missing = wanted - sum(map(gain, chosen))
        while missing > 0:
            left = [v for v in usable if v not in chosen and self._legal([*chosen, v])]
            if not left:
                return False
            enough = [v for v in left if gain(v) >= missing]
            best = min(enough or left, key=lambda v: (v.cause, v.size if enough else -gain(v), *self._preference_order(v)))
            chosen.append(best)
            missing -= gain(best)
        return True

    def _preference_order(self, victim: Victim) -> tuple[float, int, float, int]:
        """Order among equal victims: the team with the largest share, the lowest priority, the shortest run."""
        return -self.board.shares.of(victim.run.team_id), victim.run.priority, -victim.run.started_at, victim.run.run_id

    def _legal(self, victims: Sequence[Victim]) -> bool:
        """Whether the rules allow to reclaim from these together."""
        freed, own = sum(v.size for v in victims), self._own(victims)
        entitled = self.board.ledger.tier(self.account, self.run.devices - own) is Tier.OWN
        for team_id in {v.run.team_id for v in victims if v.cause is Cause.RECLAIM}:
            *before, last = [v.size for v in victims if v.run.team_id == team_id]
            if not self.may_reclaim(team_id, sum(before), freed, own):
                return False
            if not entitled and self.board.ledger.borrowed((team_id, self.place.pool_id), sum(before)) < last:
                return False
        return True

    def _own(self, victims: Sequence[Victim]) -> int:
        """Devices that the run's own team gives up."""
        return sum(v.size for v in victims if v.run.team_id == self.run.team_id)

    def _spare(self, chosen: list[Victim]) -> list[Victim]:
        """Drop victims that are not needed, the least preferred first."""
        for victim in sorted(chosen, key=lambda v: (v.cause, *self._preference_order(v)), reverse=True):
            fewer = [v for v in chosen if v is not victim]
            if self._is_enough(fewer) and self._legal(fewer):
                chosen = fewer
        return chosen

    def _is_enough(self, victims: Sequence[Victim]) -> bool:
        return self._own(victims) >= self.owed and self._cut(victims) is not None

    def _cut(self, victims: Sequence[Victim]) -> Cut | None:
        def amount(each: NodeDevices) -> int:
            return self._open(each) + sum(len(v.by_bin.get(each, ())) for v in victims)

        return cut(self.place.bins, self.demand, amount)

    def _cleared(self, victims: list[Victim]) -> Cleared:
        devices = {}
        for each, count in self._cut(victims) or []:
            open_to = [*each.free, *sorted(each.soon), *(d for v in victims for d in v.by_bin.get(each, ()))]
            devices[each.node.node_id] = tuple(open_to[:count])
        return Cleared(self.place, devices, victims)
