"""GPUs whose clocks fall: they work, and slower than they should, which nobody would notice but in a run's pace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Heartbeats, two seconds apart. A moment of heat is nothing; a card that has cooled down while idle is not well yet.
SLOW_BEATS, WELL_BEATS = 15, 150
# Under this load or more, a clock below this share of the card's highest needs an explanation.
LOADED, LOW = 0.9, 0.6
HOT = ("nvmlClocksEventReasonHwThermalSlowdown", "nvmlClocksEventReasonSwThermalSlowdown")
POWER = ("nvmlClocksEventReasonHwPowerBrakeSlowdown",)
OTHERWISE = ("nvmlClocksEventReasonHwSlowdown",)
# What lowers clocks by intention: a power limit, somebody's setting, cards that keep step.
INTENDED = (
    "nvmlClocksEventReasonSwPowerCap", "nvmlClocksEventReasonApplicationsClocksSetting", "nvmlClocksEventReasonSyncBoost",
    "nvmlClocksEventReasonDisplayClockSetting",
)  # fmt: skip


@dataclass(slots=True)
class _Card:
    """What was seen of one card: beats in a row, and the words for it while it is reported."""

    slow: int = 0
    well: int = 0
    words: str = ""


class ClockWatch:
    """Looks at each card once a heartbeat. What it says has no numbers in it, so that a card that was put back stays there."""

    def __init__(self) -> None:
        self._cards: dict[int, _Card] = {}

    def look(self, nvml: Any, index: int, handle: Any, busy_share: float | None) -> str:
        """Why the card is slow, once it has been for `SLOW_BEATS` and until it has not been for `WELL_BEATS`; else empty."""
        card = self._cards.setdefault(index, _Card())
        words = slowed(nvml, handle, busy_share)
        card.slow, card.well = (card.slow + 1, 0) if words else (0, card.well + 1)
        if card.slow >= SLOW_BEATS:
            card.words = card.words or words
        elif card.well >= WELL_BEATS:
            card.words = ""
        return card.words


def slowed(nvml: Any, handle: Any, busy_share: float | None) -> str:
    """What slows a card down at this moment; empty: nothing, or the card does not tell."""
    try:
        reasons = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if _any(nvml, reasons, HOT):
            return "clocks are throttled: temperature limit"
        if _any(nvml, reasons, POWER):
            return "clocks are throttled: external power brake"
        if _any(nvml, reasons, OTHERWISE):
            return "clocks are throttled: hardware slowdown"
        if busy_share is None or busy_share < LOADED or _any(nvml, reasons, INTENDED):
            return ""
        clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        highest = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
    except nvml.NVMLError:
        return ""
    return "clocks stay low under load; the driver reports no reason" if clock < LOW * highest else ""


def _any(nvml: Any, reasons: int, names: tuple[str, ...]) -> bool:
    return any(reasons & int(getattr(nvml, name)) for name in names)
