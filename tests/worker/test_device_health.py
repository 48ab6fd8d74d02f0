"""Device health from NVML, with a fake NVML because tests have no GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from worker import devices
from worker.devices import device_reports, engine_environment
from worker.gpu_throttling import RECOVERED_BEATS, SLOW_BEATS, ThrottleMonitor, throttle_reason


class NVMLError(Exception):
    """A query that the card does not support."""


@dataclass
class Nvml:
    """One card with these compute processes and this many memory errors (None: a card without ECC)."""

    pids: tuple[int, ...] = ()
    errors: int | None = 0
    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)  # remapped after one kind of error and the other, waiting, failed
    pages_wait: int | None = None  # cards that remap rows retire no pages, and the other way round
    reasons: int | None = 0  # bits; None: a card that does not tell
    clock: int = 1900
    load: int = 50
    NVMLError = NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_CLOCK_SM = 1
    nvmlClocksEventReasonSwPowerCap = pynvml.nvmlClocksEventReasonSwPowerCap
    nvmlClocksEventReasonHwSlowdown = pynvml.nvmlClocksEventReasonHwSlowdown
    nvmlClocksEventReasonSyncBoost = pynvml.nvmlClocksEventReasonSyncBoost
    nvmlClocksEventReasonSwThermalSlowdown = pynvml.nvmlClocksEventReasonSwThermalSlowdown
    nvmlClocksEventReasonHwThermalSlowdown = pynvml.nvmlClocksEventReasonHwThermalSlowdown
    nvmlClocksEventReasonHwPowerBrakeSlowdown = pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
    nvmlClocksEventReasonDisplayClockSetting = pynvml.nvmlClocksEventReasonDisplayClockSetting
    nvmlClocksEventReasonApplicationsClocksSetting = pynvml.nvmlClocksEventReasonApplicationsClocksSetting

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, _handle: int) -> Any:
        return SimpleNamespace(gpu=self.load)

    def nvmlDeviceGetCurrentClocksEventReasons(self, _handle: int) -> int:
        if self.reasons is None:
            raise NVMLError
        return self.reasons

    def nvmlDeviceGetClockInfo(self, _handle: int, _kind: int) -> int:
        return self.clock

    def nvmlDeviceGetMaxClockInfo(self, _handle: int, _kind: int) -> int:
        return 1980

    def nvmlDeviceGetMemoryInfo(self, _handle: int) -> Any:
        return SimpleNamespace(total=1)

    def nvmlDeviceGetName(self, _handle: int) -> str:
        return "H100"

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetTotalEccErrors(self, _handle: int, _kind: int, _counter: int) -> int:
        if self.errors is None:
            raise NVMLError
        return self.errors

    def nvmlDeviceGetRemappedRows(self, _handle: int) -> tuple[int, int, int, int]:
        if self.rows is None:
            raise NVMLError
        return self.rows

    def nvmlDeviceGetRetiredPagesPendingStatus(self, _handle: int) -> int:
        if self.pages_wait is None:
            raise NVMLError
        return self.pages_wait


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> devices._Driver:
    """Reset the driver state before each test."""
    fresh = devices._Driver()
    monkeypatch.setattr(devices, "_driver", fresh)
    return fresh


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the machine have one card."""

    def install(**facts: Any) -> None:
        monkeypatch.setattr(devices, "_nvml", lambda: Nvml(**facts))

    return install


def test_idle_card_is_healthy(card: Any) -> None:
    for errors in (0, None):
        card(errors=errors)
        assert [(report.kind, report.health) for report in device_reports()] == [("cuda", "")]


class Two(Nvml):
    """A second card that the driver cannot access."""

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if handle == 1:
            raise NVMLError("GPU is lost")
        return super().nvmlDeviceGetMemoryInfo(handle)


def test_lost_card_does_not_affect_other_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_nvml", Two)
    well, lost = device_reports(throttling=ThrottleMonitor())
    assert (well.model, well.health) == ("H100", "")
    assert (lost.index, lost.kind, lost.model, lost.memory_bytes) == (1, "cuda", "", 0)
    assert lost.health == "the driver cannot access the device: GPU is lost"


def test_driver_may_load_after_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = iter([pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED), None])

    def starts_late() -> None:
        if (error := next(starts)) is not None:
            raise error

    monkeypatch.setattr(pynvml, "nvmlInit", starts_late)
    assert devices._nvml() is None
    assert devices._nvml() is pynvml
    assert devices._nvml() is pynvml, "it is started once"


class Exchanged(Nvml):
    """The driver is updated while the agent runs."""

    def nvmlDeviceGetCount(self) -> int:
        raise NVMLError("Driver/library version mismatch")


def test_driver_update_reports_cards_as_inaccessible(monkeypatch: pytest.MonkeyPatch, driver: devices._Driver) -> None:
    said = []
    driver.started = True
    for found in (Two(), Exchanged(), None, Nvml()):
        monkeypatch.setattr(devices, "_nvml", lambda found=found: found)
        said.append([(report.kind, report.health) for report in device_reports()])
    unreachable = "the driver cannot access the device: "
    assert said[1] == [("cuda", f"{unreachable}Driver/library version mismatch")] * 2
    assert said[2] == [("cuda", f"{unreachable}device does not respond")] * 2
    assert said[3] == [("cuda", "")]
    assert not driver.started, "the library is started anew"


def test_engine_environment_selects_devices_by_pci_order(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's default order, fastest first, differs on a node with two kinds of cards."""
    card()
    assert engine_environment([2, 5]) == {"CUDA_VISIBLE_DEVICES": "2,5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    monkeypatch.setattr(devices, "_nvml", lambda: None)
    assert engine_environment([0]) == {}


def test_leftover_processes_are_ignored_on_busy_devices(card: Any) -> None:
    gone = 2**22 + 1  # above every process id
    card(pids=(gone, os.getpid()))
    said = device_reports()[0].health
    assert said.startswith(f"leftover processes: {os.getpid()} (")
    assert said.endswith(f"), {gone}")
    assert device_reports(busy={0})[0].health == ""


def test_memory_errors_are_reported_on_busy_devices(card: Any) -> None:
    card(errors=3)
    assert "ECC" in device_reports(busy={0})[0].health
    card(errors=4)
    assert "4" not in device_reports()[0].health, "the sentence stays the same, so that a card that was put back stays there"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"rows": (2, 1, 0, 0)}, ""),  # remapped long ago
        ({"rows": (0, 1, 1, 0)}, "memory row remapping pending: needs a reset"),
        ({"rows": (0, 8, 1, 1)}, "memory row remapping failed: replace the card"),
        ({"rows": None, "pages_wait": 0}, ""),
        ({"rows": None, "pages_wait": 1}, "memory page retirement pending: needs a reset"),
        ({"rows": (0, 1, 1, 0), "errors": 1}, "uncorrectable ECC memory errors since the last reset"),
        ({"rows": (0, 1, 0, 1), "errors": 1}, "memory row remapping failed: replace the card"),
    ],
)
def test_pending_and_failed_row_remapping_is_reported(card: Any, facts: dict[str, Any], said: str) -> None:
    card(**facts)
    assert device_reports(busy={0})[0].health == said


def test_stuck_message_overrides_other_health(card: Any) -> None:
    card()
    assert device_reports(stuck={0: "attempt 1 could not be cleaned up"})[0].health == "attempt 1 could not be cleaned up"


def health_after(beats: int, clocks: ThrottleMonitor, held: tuple[int, ...] = ()) -> str:
    """The health at the last of this many heartbeats."""
    return [device_reports(busy=held, throttling=clocks)[0].health for _ in range(beats)][-1]


def test_throttling_is_reported_until_recovery(card: Any) -> None:
    clocks = ThrottleMonitor()
    card(reasons=pynvml.nvmlClocksEventReasonHwThermalSlowdown)
    assert health_after(SLOW_BEATS - 1, clocks) == ""
    hot = health_after(1, clocks, held=(0,))
    assert hot == "clocks are throttled: temperature limit"
    card(reasons=pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown)
    assert health_after(SLOW_BEATS, clocks) == hot, "the sentence stays the same, so that a card that was put back stays there"
    card()
    assert health_after(RECOVERED_BEATS - 1, clocks) == hot
    assert health_after(1, clocks) == ""


def test_short_throttling_is_ignored(card: Any) -> None:
    clocks = ThrottleMonitor()
    for _ in range(3):
        card(reasons=pynvml.nvmlClocksEventReasonSwThermalSlowdown)
        assert health_after(SLOW_BEATS - 1, clocks) == ""
        card()
        assert health_after(1, clocks) == ""


@pytest.mark.parametrize(
    ("facts", "busy", "said"),
    [
        ({"clock": 900}, 1.0, "clocks stay low under load; the driver reports no reason"),
        ({"clock": 900}, 0.5, ""),  # an idle card saves power
        ({"clock": 900}, None, ""),
        ({"clock": 1300}, 1.0, ""),
        ({"clock": 900, "reasons": pynvml.nvmlClocksEventReasonSwPowerCap}, 1.0, ""),  # its power limit is meant
        ({"clock": 900, "reasons": pynvml.nvmlClocksEventReasonApplicationsClocksSetting}, 1.0, ""),
        ({"reasons": pynvml.nvmlClocksEventReasonHwSlowdown}, 0.0, "clocks are throttled: hardware slowdown"),
        ({"reasons": pynvml.nvmlClocksEventReasonGpuIdle}, 0.0, ""),
        ({"reasons": None, "clock": 900}, 1.0, ""),
    ],
)
def test_throttle_reasons(facts: dict[str, Any], busy: float | None, said: str) -> None:
    assert throttle_reason(Nvml(**facts), 0, busy) == said
