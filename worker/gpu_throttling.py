"""Detects GPUs with throttled clocks, from NVML's clock event reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Consecutive heartbeats, 2 s apart, to report and to clear: short throttling is ignored, and so is recovery while idle.
SLOW_BEATS, RECOVERED_BEATS = 15, 150
# At this utilization or more, an SM clock below this share of the maximum is unexplained slowness.
LOADED, LOW = 0.9, 0.6
HOT = ("nvmlClocksEventReasonHwThermalSlowdown", "nvmlClocksEventReasonSwThermalSlowdown")
POWER = ("nvmlClocksEventReasonHwPowerBrakeSlowdown",)
HARDWARE = ("nvmlClocksEventReasonHwSlowdown",)
# Low clocks by configuration: power cap, application clocks, sync boost.
INTENDED = (
    "nvmlClocksEventReasonSwPowerCap", "nvmlClocksEventReasonApplicationsClocksSetting", "nvmlClocksEventReasonSyncBoost",
    "nvmlClocksEventReasonDisplayClockSetting",
)  # fmt: skip


@dataclass(slots=True)
class _Card:
    """Consecutive slow and normal heartbeats of one card, and the reported reason."""

    slow: int = 0
    normal: int = 0
    reason: str = ""


class ThrottleMonitor:
    """Called once per heartbeat and card. Messages contain no numbers, so a changed reading does not void a waiver."""

    def __init__(self) -> None:
        self._cards: dict[int, _Card] = {}

    def update(self, nvml: Any, index: int, handle: Any, busy_share: float | None) -> str:
        """The reason, from `SLOW_BEATS` slow heartbeats until `RECOVERED_BEATS` normal ones; else empty."""
        card = self._cards.setdefault(index, _Card())
        reason = throttle_reason(nvml, handle, busy_share)
        card.slow, card.normal = (card.slow + 1, 0) if reason else (0, card.normal + 1)
        if card.slow >= SLOW_BEATS:
            card.reason = card.reason or reason
        elif card.normal >= RECOVERED_BEATS:
            card.reason = ""
        return card.reason


def throttle_reason(nvml: Any, handle: Any, busy_share: float | None) -> str:
    """Why a card's clocks are low now; empty: not throttled, or not reported."""
    try:
        reasons = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        for names, what in ((HOT, "temperature limit"), (POWER, "external power brake"), (HARDWARE, "hardware slowdown")):
            if _any(nvml, reasons, names):
                return f"clocks are throttled: {what}"
        if busy_share is None or busy_share < LOADED or _any(nvml, reasons, INTENDED):
            return ""
        clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        maximum = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
    except nvml.NVMLError:
        return ""
    return "clocks stay low under load; the driver reports no reason" if clock < LOW * maximum else ""


def _any(nvml: Any, reasons: int, names: tuple[str, ...]) -> bool:
    return any(reasons & int(getattr(nvml, name)) for name in names)
