"""What the node has to compute with: its NVIDIA GPUs, or else its CPU as one device."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from oppo_contract.wire import DeviceReport


def device_reports() -> list[DeviceReport]:
    """Every device with its load now. A GPU node offers its GPUs only; another node one `cpu` device."""
    return _gpus() or [_cpu()]


def engine_environment(device_indices: list[int]) -> dict[str, str]:
    """Variables that confine an engine to its devices."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in device_indices)} if _nvml() else {}


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def memory_bytes() -> int:
    """The machine's memory."""
    return int(psutil.virtual_memory().total)


@functools.cache
def _nvml() -> Any:
    """The NVML library, started; None on a machine without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _gpus() -> list[DeviceReport]:
    nvml = _nvml()
    return [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())] if nvml else []


def _gpu(nvml: Any, index: int) -> DeviceReport:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError:  # not every card tells
        busy = None
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return DeviceReport(index=index, kind="cuda", model=str(nvml.nvmlDeviceGetName(handle)), memory_bytes=memory, busy_share=busy)


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
