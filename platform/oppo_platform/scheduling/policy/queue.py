"""Order in which waiting runs are considered.

First come runs for which others were preempted, so that no other run takes that room. Then, within a team: higher priority, then
the older submission. Between teams, by each team's next run only: own quota before borrowed, then a run with a reservation, then
the lower share, then the older submission. Every decision changes quotas and shares, so the order is computed one run at a time.

A run that fits its quota in one pool and would borrow in another has two turns: it does not borrow too early.
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
    """The waiting runs in their order."""

    def __init__(
        self, runs: Iterable[WaitingRun], allowed_tiers: TiersOf, shares: Shares, reservations: Iterable[Reservation] = ()
    ) -> None:
        """`allowed_tiers`: tiers in which a run could start, best first; `reservations`: those of the last plan."""
        self._tiers_of, self._shares = allowed_tiers, shares
        self._cleared = {reservation.run_id: reservation.cleared for reservation in reservations}
        self._teams: dict[int, list[WaitingRun]] = {}
        for run in sorted(runs, key=lambda r: (not self._cleared.get(r.run_id), place_in_team(r)), reverse=True):
            self._teams.setdefault(run.team_id, []).append(run)
        self._deferred: Tier | None = None

    def turns(self) -> Iterator[tuple[WaitingRun, Tier]]:
        """Yield the runs with the tier of their turn; the caller applies its decision before it takes the next."""
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
        """Give the current run another turn in its next tier; False if there is none."""
        self._deferred = next((later for later in self._tiers_of(run) if later > tier), None)
        return self._deferred is not None

    def _turn(self, run: WaitingRun, tier: Tier | None = None) -> Turn:
        first = self._tiers_of(run)[0] if tier is None else tier
        cleared, reserved = self._cleared.get(run.run_id, False), run.run_id in self._cleared
        return not cleared, first, not reserved, self._shares.of(run.team_id), run.submitted_at, run.run_id, run.team_id
