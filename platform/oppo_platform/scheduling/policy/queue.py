"""The order in which waiting runs are looked at.

First come runs that others were asked to make room for: else somebody might take that room, and the same would be asked again.
Then, within a team: higher priority, then the older submission. Between teams, looking at each team's next run only: own quota
before borrowed, then the run that already holds a reservation, then the lower share, then the older submission. Every decision
moves quotas and shares, so the order is found one run at a time.

A run that could be within its quota in one pool and borrow in another has two turns: it does not borrow before its time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from oppo_platform.scheduling.policy.fair_share import Shares
from oppo_platform.scheduling.policy.quota import Tier
from oppo_platform.scheduling.policy.snapshot import Reservation, WaitingRun

TiersOf = Callable[[WaitingRun], list[Tier]]
Turn = tuple[bool, Tier, bool, float, float, int, int]  # not cleared, tier, not reserved, share, submitted at, run id, team id


def place_in_team(run: WaitingRun) -> tuple[int, float, int]:
    """Sorts the runs of one team."""
    return -run.priority, run.submitted_at, run.run_id


class Queue:
    """The waiting runs, each in its turn."""

    def __init__(
        self, runs: Iterable[WaitingRun], tiers_of: TiersOf, shares: Shares, reservations: Iterable[Reservation] = ()
    ) -> None:
        """`tiers_of`: the tiers in which a run could start, best first; `reservations`: those of the last plan."""
        self._tiers_of, self._shares = tiers_of, shares
        self._cleared = {reservation.run_id: reservation.cleared for reservation in reservations}
        self._teams: dict[int, list[WaitingRun]] = {}
        for run in sorted(runs, key=lambda r: (not self._cleared.get(r.run_id), place_in_team(r)), reverse=True):
            self._teams.setdefault(run.team_id, []).append(run)
        self._deferred: Tier | None = None

    def turns(self) -> Iterator[tuple[WaitingRun, Tier]]:
        """Yield the runs with the tier of their turn; the caller enters what it decides on one before it takes the next."""
        heap = [self._turn(waiting[-1]) for waiting in self._teams.values()]
        heapq.heapify(heap)
        while heap:
            _, tier, *_, team_id = heapq.heappop(heap)
            waiting = self._teams[team_id]
            yield waiting[-1], tier
            if self._deferred is None:
                waiting.pop()
            if waiting:
                heapq.heappush(heap, self._turn(waiting[-1], self._deferred))
            self._deferred = None

    def defer(self, run: WaitingRun, tier: Tier) -> bool:
        """Give the run whose turn it is another one in its next tier; False: there is none."""
        self._deferred = next((later for later in self._tiers_of(run) if later > tier), None)
        return self._deferred is not None

    def _turn(self, run: WaitingRun, tier: Tier | None = None) -> Turn:
        first = self._tiers_of(run)[0] if tier is None else tier
        cleared, reserved = self._cleared.get(run.run_id, False), run.run_id in self._cleared
        return not cleared, first, not reserved, self._shares.of(run.team_id), run.submitted_at, run.run_id, run.team_id
