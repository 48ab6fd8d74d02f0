"""What speaks against giving a GPU away, as NVML tells it. A few lines stand in for NVML, because tests have no GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from worker import devices
from worker.devices import device_reports


class NVMLError(Exception):
    """Not every card tells everything."""


@dataclass
class Nvml:
    """One card with these compute processes and this many memory errors (None: a card without ECC)."""

    pids: tuple[int, ...] = ()
    errors: int | None = 0
    NVMLError = NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, _handle: int) -> Any:
        return SimpleNamespace(gpu=50)

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


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the machine have one card."""

    def install(**facts: Any) -> None:
        monkeypatch.setattr(devices, "_nvml", lambda: Nvml(**facts))

    return install


def test_a_card_that_nothing_computes_on_is_well(card: Any) -> None:
    for errors in (0, None):
        card(errors=errors)
        assert [(report.kind, report.health) for report in device_reports()] == [("cuda", "")]


def test_processes_count_unless_an_attempt_of_this_node_holds_the_card(card: Any) -> None:
    gone = 2**22 + 1  # above every process id
    card(pids=(gone, os.getpid()))
    said = device_reports()[0].health
    assert said.startswith(f"processes are left on it: {os.getpid()} (")
    assert said.endswith(f"), {gone}")
    assert device_reports(held={0})[0].health == ""


def test_memory_errors_count_also_under_a_run(card: Any) -> None:
    card(errors=3)
    assert "ECC" in device_reports(held={0})[0].health
    card(errors=4)
    assert "4" not in device_reports()[0].health, "the sentence stays the same, so that a card that was put back stays there"


def test_what_a_supervisor_could_not_clear_goes_first(card: Any) -> None:
    card()
    assert device_reports(stuck={0: "attempt 1 could not be cleared away"})[0].health == "attempt 1 could not be cleared away"
