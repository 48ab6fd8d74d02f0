"""Quotas by team and pool, in devices.

For team t in pool p: used = held devices; promised = devices of its blocked head; limit = nominal + borrow cap.
A request of d is within its own quota if used + promised + d ≤ nominal, borrows if that is ≤ limit, else it is over.
Borrowed = max(0, used − leaving − nominal), where leaving = devices of stopping runs.
"""

from __future__ import annotations

from collections import Counter
from enum import IntEnum

from oppo_platform.scheduling.policy.snapshot import NO_QUOTA, DevicesByNode, Quota, Snapshot

Account = tuple[int, int]  # (team id, pool id)


class Tier(IntEnum):
    """A request in relation to its team's quota; the lower tier goes first."""

    OWN = 0
    BORROWED = 1
    OVER = 2


class Ledger:
    """Device use by team and pool, updated by a plan."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Count the devices of running runs."""
        self.used: Counter[Account] = Counter()
        self.leaving: Counter[Account] = Counter()
        self.promised: Counter[Account] = Counter()
        self.promised_from: dict[Account, float] = {}
        self.changes: Counter[int] = Counter()  # of `used` and `promised`, by team
        self._quotas = {(team.team_id, pool_id): quota for team in snapshot.teams for pool_id, quota in team.quotas.items()}
        self._pool_of = {node.node_id: node.pool_id for node in snapshot.nodes}
        for run in snapshot.running:
            self.add(run.team_id, run.devices)
            if run.stopping:
                self.leave(run.team_id, run.devices)

    def quota(self, account: Account) -> Quota:
        return self._quotas.get(account, NO_QUOTA)

    def limit(self, account: Account) -> int | None:
        """The maximum of devices of the team in the pool; None: no limit."""
        return self.quota(account).limit

    def devices_by_pool(self, devices: DevicesByNode) -> Counter[int]:
        """Devices by pool, without those of nodes that are not in the snapshot."""
        counts: Counter[int] = Counter()
        for node_id, ids in devices.items():
            if node_id in self._pool_of:
                counts[self._pool_of[node_id]] += len(ids)
        return counts

    def add(self, team_id: int, devices: DevicesByNode) -> None:
        """Count these devices as used by the team."""
        for pool_id, count in self.devices_by_pool(devices).items():
            self.used[team_id, pool_id] += count
        self.changes[team_id] += 1

    def leave(self, team_id: int, devices: DevicesByNode) -> None:
        """Count these devices as those of a stopping run."""
        for pool_id, count in self.devices_by_pool(devices).items():
            self.leaving[team_id, pool_id] += count

    def promise(self, account: Account, devices: int, start: float) -> None:
        """Reserve quota for a blocked run with this estimated start."""
        self.promised[account] += devices
        self.changes[account[0]] += 1
        self.promised_from[account] = min(start, self.promised_from.get(account, start))

    def tier(self, account: Account, devices: int) -> Tier:
        """A request's tier, with promised devices counted as used."""
        limit, total = self.limit(account), self.used[account] + self.promised[account] + devices
        if total <= self.quota(account).nominal:
            return Tier.OWN
        return Tier.BORROWED if limit is None or total <= limit else Tier.OVER

    def fits_until(self, account: Account, devices: int, until: float) -> bool:
        """Whether a run that ends by `until` keeps within the quota and delays no promise."""
        limit, total = self.limit(account), self.used[account] + devices
        if limit is None or total + self.promised[account] <= limit:
            return True
        return total <= limit and until <= self.promised_from.get(account, until)

    def over_by(self, account: Account, devices: int) -> int:
        """Devices that the team must release before the request fits, beyond those that are leaving."""
        limit = self.limit(account)
        if limit is None:
            return 0
        return max(0, self.used[account] - self.leaving[account] + self.promised[account] + devices - limit)

    def borrowed(self, account: Account, lost: int = 0) -> int:
        """Devices that the team holds beyond its own, without leaving ones and `lost` more."""
        return max(0, self.used[account] - self.leaving[account] - lost - self.quota(account).nominal)

    def would_borrow(self, account: Account, extra: int) -> int:
        """Devices beyond its own that the team would hold with `extra` more and its promised ones."""
        return self.borrowed(account, -self.promised[account] - extra)
