"""What the node has to compute with: its NVIDIA GPUs, or else its CPU as one device."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from oppo_contract.wire import DeviceReport
from worker.gpu_throttling import ClockWatch


def device_reports(
    held: Container[int] = (), stuck: Mapping[int, str] | None = None, clocks: ClockWatch | None = None
) -> list[DeviceReport]:
    """Every device with its load now, and what speaks against it. A GPU node offers its GPUs only; another one `cpu` device.

    Args:
        held: devices on which attempts of this node run: processes there are theirs.
        stuck: what a supervisor could not clear away, by device.
        clocks: who remembers how the GPUs' clocks were at earlier heartbeats.
    """
    found = _gpus(held, clocks) or [_cpu()]
    if not stuck:
        return found
    return [report.model_copy(update={"health": stuck.get(report.index, report.health)[:500]}) for report in found]


def engine_environment(device_indices: list[int]) -> dict[str, str]:
    """Variables that confine an engine to its devices. NVML numbers GPUs by their bus; CUDA would put the fastest first."""
    if not _nvml():
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in device_indices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def memory_bytes() -> int:
    """The machine's memory."""
    return int(psutil.virtual_memory().total)


@dataclass(slots=True)
class _Driver:
    """What this process knows of the driver."""

    started: bool = False
    gpus: int = 0  # as many as it told of last


_driver = _Driver()


def _nvml() -> Any:
    """The NVML library, started; None where there is no driver now. A node may be up before its driver is, so each call tries."""
    import pynvml

    if not _driver.started:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        _driver.started = True
    return pynvml


def _gpus(held: Container[int], clocks: ClockWatch | None) -> list[DeviceReport]:
    nvml = _nvml()
    if nvml is None:
        return [_lost(index, "device does not respond") for index in range(_driver.gpus)]
    try:
        _driver.gpus = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:  # the driver is being exchanged, say: it is begun with anew at the next call
        _driver.started = False
        return [_lost(index, error) for index in range(_driver.gpus)]
    return [_gpu_or_lost(nvml, index, index in held, clocks) for index in range(_driver.gpus)]


def _gpu_or_lost(nvml: Any, index: int, held: bool, clocks: ClockWatch | None) -> DeviceReport:
    """A GPU that the driver has lost is reported as such: the node's others go on."""
    try:
        return _gpu(nvml, index, held, clocks)
    except nvml.NVMLError as error:
        return _lost(index, error)


def _lost(index: int, why: object) -> DeviceReport:
    return DeviceReport(
        index=index, kind="cuda", model="", memory_bytes=0, health=f"the driver cannot access the device: {why}"[:500]
    )


def _gpu(nvml: Any, index: int, held: bool, clocks: ClockWatch | None) -> DeviceReport:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError:  # not every card tells
        busy = None
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    slow = clocks.look(nvml, index, handle, busy) if clocks is not None else ""
    health = _memory_errors(nvml, handle) or ("" if held else _left_on(nvml, handle)) or slow
    name = str(nvml.nvmlDeviceGetName(handle))
    return DeviceReport(index=index, kind="cuda", model=name, memory_bytes=memory, busy_share=busy, health=health)


def _memory_errors(nvml: Any, handle: Any) -> str:
    """The worst that the driver tells of its memory; no sentence has a number, so that each stays the same.

    Rows are exchanged and pages given up when the GPU is next reset; a card that cannot exchange a row any more has to go.
    """
    errors = _asked(nvml, "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    _, _, waiting, failed = _asked(nvml, "nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    if failed:
        return "memory row remapping failed: replace the card"
    if errors:
        return "uncorrectable ECC memory errors since the last reset"
    if waiting:
        return "memory row remapping pending: needs a reset"
    if _asked(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle):
        return "memory page retirement pending: needs a reset"
    return ""


def _asked(nvml: Any, function: str, *arguments: Any) -> Any:
    """What NVML says; None where the card or its driver does not tell."""
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:  # such as a card without ECC memory, or one that retires pages and knows no rows
        return None


def _left_on(nvml: Any, handle: Any) -> str:
    """Processes that compute on a GPU which no attempt of this node holds."""
    try:
        numbers = sorted(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:
        return ""
    return f"leftover processes: {', '.join(map(_named, numbers[:8]))}" if numbers else ""


def _named(pid: int) -> str:
    try:
        return f"{pid} ({psutil.Process(pid).name()})"
    except psutil.Error:  # ended meanwhile, or in another container
        return str(pid)


def _cpu() -> DeviceReport:
    busy = psutil.cpu_percent(interval=None) / 100  # since the last call
    return DeviceReport(index=0, kind="cpu", model=_cpu_name(), memory_bytes=memory_bytes(), busy_share=busy)


def _cpu_name() -> str:
    if sys.platform == "darwin":
        told = subprocess.run(["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        return told.stdout.strip() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
