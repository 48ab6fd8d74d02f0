"""What must be done now and then, whoever does it: a round seals the series of attempts that have enough hot points."""

from __future__ import annotations

from oppo_platform import clock
from oppo_platform.telemetry.models import HousekeeperBeat
from oppo_platform.telemetry.sealing import attempts_to_seal, seal


def keep_house() -> int:
    """One round. Returns how many points were sealed. Several housekeepers at once are harmless."""
    sealed = sum(seal(attempt_id) for attempt_id in attempts_to_seal())
    HousekeeperBeat.objects.update_or_create(pk=1, defaults={"last_round_at": clock.now()})
    return sealed
