"""The order of waiting runs in a plan.

Runs with preempted victims come first, so that no other run takes the released devices. Within a team: higher priority, then
older submission. Between teams, by each team's next run: own quota before borrowed, then an existing reservation, then the lower
share, then the older submission. Each decision changes quotas and shares, so the order is computed one run at a time.

A run that is within its quota in one pool and borrows in another is considered twice: within its quota, then as a borrower.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, itemgetter

from oppo_platform.scheduling.policy.fair_share import Shares
from oppo_platform.scheduling.policy.quota import Tier
from oppo_platform.scheduling.policy.snapshot import Request, Reservation, WaitingRun

TiersOf = Callable[[WaitingRun], list[Tier]]
Turn = tuple[bool, Tier, bool, float, float, int, int]  # not cleared, tier, not reserved, share, submitted at, run id, team id
PLACE_IN_TEAM = attrgetter("place_in_team")  # the sort key within a team
FIRST_TURN: Turn = (False, Tier.OWN, False, 0.0, 0.0, 0, 0)  # before any run's


class Queue:
    """The waiting runs in their order."""

    def __init__(
        self, runs: Iterable[WaitingRun], tiers_of: TiersOf, shares: Shares, reservations: Iterable[Reservation] = ()
    ) -> None:
        """`tiers_of`: the possible tiers of a run, best first; `reservations`: those of the last plan."""
        self._tiers_of, self._shares = tiers_of, shares
        self._cleared = {reservation.run_id: reservation.cleared for reservation in reservations}
        self._teams: dict[int, list[WaitingRun]] = {}
        last_first = sorted(runs, key=PLACE_IN_TEAM, reverse=True)
        if any(self._cleared.values()):
            last_first.sort(key=lambda run: self._cleared.get(run.run_id, False))
        for run in last_first:
            self._teams.setdefault(run.team_id, []).append(run)
        self._deferred: Tier | None = None

    def turns(self) -> Iterator[tuple[WaitingRun, Tier]]:
        """Yield the runs with the tier of their turn; the caller applies each decision before the next item."""
        heap = [self._next_turn(waiting[-1]) for waiting in self._teams.values()]
        heapq.heapify(heap)
        while heap:
            _, tier, *_, team_id = heapq.heappop(heap)
            waiting = self._teams[team_id]
            run = waiting.pop()
            yield run, tier
            if self._deferred is not None:
                waiting.append(run)
            if waiting:
                heapq.heappush(heap, self._next_turn(waiting[-1], self._deferred))
            self._deferred = None

    @property
    def later(self) -> Iterator[WaitingRun]:
        """The runs that have not had their last turn, without the current one, team by team."""
        return chain.from_iterable(self._teams.values())

    def rest(self) -> list[WaitingRun]:
        """`later` in the order of their last turns, which is known once no decision changes quotas and shares.

        A run goes after those before it in its team, hence with the latest of their turns and its own.
        """
        turns: list[tuple[Turn, WaitingRun]] = []
        for team_id, waiting in self._teams.items():
            share, latest = self._shares.share(team_id), FIRST_TURN
            last_tiers: dict[Request, Tier] = {}
            for run in reversed(waiting):
                if run.request not in last_tiers:
                    last_tiers[run.request] = self._tiers_of(run)[-1]
                latest = max(latest, self._turn(run, last_tiers[run.request], share))
                turns.append((latest, run))
        turns.sort(key=itemgetter(0))
        return [run for _, run in turns]

    def defer(self, run: WaitingRun, tier: Tier) -> bool:
        """Give the current run another turn in its next tier; False if there is none."""
        self._deferred = next((later for later in self._tiers_of(run) if later > tier), None)
        return self._deferred is not None

    def _next_turn(self, run: WaitingRun, tier: Tier | None = None) -> Turn:
        return self._turn(run, self._tiers_of(run)[0] if tier is None else tier, self._shares.share(run.team_id))

    def _turn(self, run: WaitingRun, tier: Tier, share: float) -> Turn:
        cleared = self._cleared.get(run.run_id)  # None: nothing is reserved for it
        return not cleared, tier, cleared is None, share, run.submitted_at, run.run_id, run.team_id
