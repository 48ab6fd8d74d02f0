"""The node's devices and their health: NVIDIA GPUs from NVML, or else the CPU as one device."""

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
from worker.gpu_throttling import ThrottleMonitor


def device_reports(
    busy: Container[int] = (), stuck: Mapping[int, str] | None = None, throttling: ThrottleMonitor | None = None
) -> list[DeviceReport]:
    """Every device with its utilization and health: the node's GPUs, or one `cpu` device.

    Args:
        busy: devices of running attempts; their processes are not leftovers.
        stuck: message for each device on which a supervisor could not clean up.
        throttling: detects throttled GPUs over several heartbeats.
    """
    reports = _gpus(busy, throttling) or [_cpu()]
    if not stuck:
        return reports
    return [report.model_copy(update={"health": stuck.get(report.index, report.health)[:500]}) for report in reports]


def engine_environment(device_indices: list[int]) -> dict[str, str]:
    """Variables that restrict an engine to its devices. NVML orders GPUs by PCI bus; CUDA's default is fastest first."""
    if not _nvml():
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in device_indices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def memory_bytes() -> int:
    """Total memory of the machine."""
    return int(psutil.virtual_memory().total)


@dataclass(slots=True)
class _Driver:
    """Driver state of this process."""

    started: bool = False
    gpus: int = 0  # last reported number


_driver = _Driver()


def _nvml() -> Any:
    """The initialised NVML library; None without a driver. Every call tries, because the driver may load later."""
    import pynvml

    if not _driver.started:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        _driver.started = True
    return pynvml


def _gpus(busy: Container[int], throttling: ThrottleMonitor | None) -> list[DeviceReport]:
    nvml = _nvml()
    if nvml is None:
        return [_lost(index, "device does not respond") for index in range(_driver.gpus)]
    try:
        _driver.gpus = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:  # such as a driver update: initialise again at the next call
        _driver.started = False
        return [_lost(index, error) for index in range(_driver.gpus)]
    return [_gpu_or_lost(nvml, index, index in busy, throttling) for index in range(_driver.gpus)]


def _gpu_or_lost(nvml: Any, index: int, busy: bool, throttling: ThrottleMonitor | None) -> DeviceReport:
    """Reports a GPU that the driver cannot access, so that the other GPUs of the node remain usable."""
    try:
        return _gpu(nvml, index, busy, throttling)
    except nvml.NVMLError as error:
        return _lost(index, error)


def _lost(index: int, why: object) -> DeviceReport:
    return DeviceReport(
        index=index, kind="cuda", model="", memory_bytes=0, health=f"the driver cannot access the device: {why}"[:500]
    )


def _gpu(nvml: Any, index: int, busy: bool, throttling: ThrottleMonitor | None) -> DeviceReport:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        busy_share = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError:  # not supported by every card
        busy_share = None
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    slow = throttling.update(nvml, index, handle, busy_share) if throttling is not None else ""
    health = _memory_errors(nvml, handle) or ("" if busy else _leftovers(nvml, handle)) or slow
    name = str(nvml.nvmlDeviceGetName(handle))
    return DeviceReport(index=index, kind="cuda", model=name, memory_bytes=memory, busy_share=busy_share, health=health)


def _memory_errors(nvml: Any, handle: Any) -> str:
    """The most severe memory error. Messages contain no numbers, so a changed reading does not void a waiver.

    A reset completes row remapping and page retirement; a card whose row remapping failed must be replaced.
    """
    errors = _query(nvml, "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    _, _, waiting, failed = _query(nvml, "nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
    if failed:
        return "memory row remapping failed: replace the card"
    if errors:
        return "uncorrectable ECC memory errors since the last reset"
    if waiting:
        return "memory row remapping pending: needs a reset"
    if _query(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle):
        return "memory page retirement pending: needs a reset"
    return ""


def _query(nvml: Any, function: str, *arguments: Any) -> Any:
    """Call an NVML function; None if the card or its driver does not support it."""
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:  # such as a card without ECC memory
        return None


def _leftovers(nvml: Any, handle: Any) -> str:
    """Compute processes on a GPU that no attempt of this node uses."""
    try:
        pids = sorted(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:
        return ""
    return f"leftover processes: {', '.join(map(_process_name, pids[:8]))}" if pids else ""


def _process_name(pid: int) -> str:
    try:
        return f"{pid} ({psutil.Process(pid).name()})"
    except psutil.Error:  # ended, or in another container
        return str(pid)


def _cpu() -> DeviceReport:
    busy_share = psutil.cpu_percent(interval=None) / 100  # since the last call
    return DeviceReport(index=0, kind="cpu", model=_cpu_name(), memory_bytes=memory_bytes(), busy_share=busy_share)


def _cpu_name() -> str:
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
