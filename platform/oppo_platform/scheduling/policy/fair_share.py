"""Fair share between teams: decayed GPU-seconds ÷ weight.

Usage of a team at instant n, with half-life H and τ = H ÷ ln 2:
    U(n) = U(t)·2^(−(n−t)/H)  +  Σ over its running runs of devices · τ · (1 − 2^(−(n−s)/H)),  s = the later of its start and t.
A placed run counts as at least `submit_penalty_s` on each of its devices, so that a burst of submissions cannot start before its
first run has used anything. Share = U ÷ weight; the lowest share goes first.
"""

from __future__ import annotations

import math

from oppo_platform.scheduling.policy.snapshot import PolicySettings, Snapshot

LEAST_WEIGHT = 1e-9


def decayed(usage_gpu_s: float, elapsed_s: float, half_life_s: float) -> float:
    """A usage in GPU-seconds after `elapsed_s` seconds of decay."""
    return usage_gpu_s * math.exp2(-max(0.0, elapsed_s) / half_life_s)


def accrued(devices: int, elapsed_s: float, half_life_s: float) -> float:
    """Decayed GPU-seconds of devices in use for the last `elapsed_s` seconds."""
    tau = half_life_s / math.log(2)
    return devices * tau * -math.expm1(-max(0.0, elapsed_s) / tau)


class Shares:
    """The decayed shares of all teams at the plan's instant, and the plan's charges."""

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        """Decay the stored usage and add the later usage of running runs."""
        self._settings: PolicySettings = snapshot.settings
        self._weights = {team.team_id: max(team.weight, LEAST_WEIGHT) for team in snapshot.teams}
        half_life_s = self._settings.half_life_s
        self.usage = {team.team_id: decayed(team.usage_gpu_s, now - team.usage_at, half_life_s) for team in snapshot.teams}
        settled = {team.team_id: team.usage_at for team in snapshot.teams}
        # Sorted, because float sums depend on the order.
        for run in sorted(snapshot.running, key=lambda r: r.run_id):
            devices = sum(len(ids) for ids in run.devices.values())
            since = max(run.started_at, settled.get(run.team_id, run.started_at))
            self._add(run.team_id, accrued(devices, now - since, half_life_s))
            self._add(run.team_id, devices * max(0.0, self._settings.submit_penalty_s - (now - run.started_at)))

    def _add(self, team_id: int, gpu_s: float) -> None:
        self.usage[team_id] = self.usage.get(team_id, 0.0) + gpu_s

    def charge(self, team_id: int, devices: int) -> None:
        """Charge a placed run in advance."""
        self._add(team_id, devices * self._settings.submit_penalty_s)

    def weight(self, team_id: int) -> float:
        """The team's weight; 1 for a team that is not in the snapshot."""
        return self._weights.get(team_id, 1.0)

    def share(self, team_id: int, extra_devices: int = 0) -> float:
        """The team's share, with `extra_devices` charged in advance."""
        usage = self.usage.get(team_id, 0.0) + extra_devices * self._settings.submit_penalty_s
        return usage / self.weight(team_id)
