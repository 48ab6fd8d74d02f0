"""The order in which waiting runs are looked at.

Within a team: higher priority, then the older submission. Between teams, looking at each team's next run only: own quota before
borrowed, then the run that already holds a reservation, then the lower share, then the older submission. Every decision moves
quotas and shares, so the order is found one run at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from oppo_platform.scheduling.policy.fair_share import Shares
from oppo_platform.scheduling.policy.snapshot import WaitingRun

TierOf = Callable[[WaitingRun], int]


def place_in_team(run: WaitingRun) -> tuple[int, float, int]:
    """Sorts the runs of one team."""
    return -run.priority, run.submitted_at, run.run_id


def in_turn(runs: Iterable[WaitingRun], tier_of: TierOf, shares: Shares, reserved: frozenset[int]) -> Iterator[WaitingRun]:
    """Yield the runs in their turn; the caller enters what it decides on one before it takes the next."""
    teams: dict[int, list[WaitingRun]] = {}
    for run in sorted(runs, key=place_in_team, reverse=True):
        teams.setdefault(run.team_id, []).append(run)

    def turn(run: WaitingRun) -> tuple[int, bool, float, float, int, int]:
        return tier_of(run), run.run_id not in reserved, shares.of(run.team_id), run.submitted_at, run.run_id, run.team_id

    heap = [turn(queue[-1]) for queue in teams.values()]
    heapq.heapify(heap)
    while heap:
        queue = teams[heapq.heappop(heap)[-1]]
        yield queue.pop()
        if queue:
            heapq.heappush(heap, turn(queue[-1]))
