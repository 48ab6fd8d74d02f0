"""GPU statistics: torch's memory, NVML's utilization and GPM's counters. None of them is `busy` (docs/metrics.md).

NVML's utilization is the share of time in which any kernel ran. GPM, on Hopper and later, has counters: active multiprocessors,
occupancy, utilization of tensor cores and memory bandwidth. Metrics that a card or driver lacks are left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from oppo_estimate.device_speed import stated_gpu

SAMPLING_INTERVAL_S = 0.25
MIN_WINDOW_S = 0.1  # shortest window of GPM
GB = 1e9
# Metric's name → GPM's name; all of them are percent.
COUNTERS = {
    "sm_util": "NVML_GPM_METRIC_SM_UTIL", "sm_occupancy": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_util": "NVML_GPM_METRIC_ANY_TENSOR_UTIL", "dram_util": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}  # fmt: skip


class GpuStats:
    """Statistics for a step's report: torch's memory on the engine's GPUs, and their drivers' metrics; nothing without a GPU.

    `flops_per_s`: the vendor's peak rate; None if unknown.
    """

    def __init__(self, devices: Sequence[torch.device] = (), drivers: Sequence[Driver] = ()) -> None:
        self.flops_per_s = stated_flops(torch.cuda.get_device_name(devices[0])) if devices else None
        self._devices, self._drivers = devices, drivers

    def take(self) -> dict[str, float]:
        """Metrics `perf/max_memory_…` (of the fuller GPU), `nvml/…` and `gpm/…` since the last call, in GB and shares, 0 to 1."""
        if not self._devices:
            return {}
        metrics = {
            "perf/max_memory_allocated_gb": max(map(torch.cuda.max_memory_allocated, self._devices)) / GB,
            "perf/max_memory_reserved_gb": max(map(torch.cuda.max_memory_reserved, self._devices)) / GB,
        }
        for driver in self._drivers:
            metrics |= driver.take()
        return metrics

    def close(self) -> None:
        """Stop sampling."""
        for driver in self._drivers:
            driver.close()


def stated_flops(name: str) -> float | None:
    """The vendor's peak rate for a GPU of this name, the usual reference of MFU, operations per second; None if unknown."""
    gpu = stated_gpu(name)
    return None if gpu is None else gpu.flops


class Driver:
    """One GPU through `nvml` (the module pynvml), sampled by a thread."""

    def __init__(self, nvml: Any, handle: Any, device: str, every_s: float = SAMPLING_INTERVAL_S) -> None:
        self._nvml, self._handle, self._device = nvml, handle, device
        self._samples: list[float] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._counters = Counters.of(nvml, handle)
        self._thread = threading.Thread(target=self._sample, args=(every_s,), name="nvml", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Utilization, memory and counters since the last call."""
        with self._lock:
            samples, self._samples = self._samples, []
        metrics: dict[str, float] = {}
        if samples:
            metrics[f"nvml/{self._device}/utilization"] = sum(samples) / len(samples)
        used = self._query(lambda: float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used))
        if used is not None:
            metrics[f"nvml/{self._device}/memory_gb"] = used / GB
        counted = self._counters.take() if self._counters is not None else {}
        return metrics | {f"gpm/{self._device}/{name}": value for name, value in counted.items()}

    def close(self) -> None:
        """Stop sampling."""
        self._end.set()
        self._thread.join()
        if self._counters is not None:
            self._counters.close()

    def _sample(self, every_s: float) -> None:
        while not self._end.wait(every_s):
            share = self._query(lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)
            if share is not None:
                with self._lock:
                    self._samples.append(share)

    def _query(self, read: Callable[[], float]) -> float | None:
        """A result; None if the card or the driver lacks it."""
        try:
            return read()
        except self._nvml.NVMLError:
            return None


class Counters:
    """GPM's counters between two samples."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._before, self._now = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(handle, self._before)
        self._since = time.monotonic()

    @classmethod
    def of(cls, nvml: Any, handle: Any) -> Self | None:
        """None for a card without them."""
        try:
            if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                return cls(nvml, handle)
        except (nvml.NVMLError, AttributeError):  # an older driver, or an older library
            pass
        return None

    def take(self) -> dict[str, float]:
        """Shares since the last call; none if that was too recent for the counters."""
        nvml, at = self._nvml, time.monotonic()
        if at - self._since < MIN_WINDOW_S:
            return {}
        try:
            nvml.nvmlGpmSampleGet(self._handle, self._now)
            request = self._request()
            nvml.nvmlGpmMetricsGet(request)
        except nvml.NVMLError:
            return {}
        self._before, self._now, self._since = self._now, self._before, at
        results = zip(COUNTERS, request.metrics, strict=False)
        return {name: metric.value / 100 for name, metric in results if metric.nvmlReturn == nvml.NVML_SUCCESS}

    def _request(self) -> Any:
        nvml = self._nvml
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(COUNTERS)
        request.sample1, request.sample2 = self._before, self._now
        for place, counter in enumerate(COUNTERS.values()):
            request.metrics[place].metricId = getattr(nvml, counter)
        return request

    def close(self) -> None:
        """Free the samples."""
        for sample in (self._before, self._now):
            self._nvml.nvmlGpmSampleFree(sample)


def build_gpu_stats(devices: dict[str, torch.device]) -> GpuStats:
    """Statistics of `devices`, all of one kind, by the names of their metrics."""
    if any(device.type != "cuda" for device in devices.values()):
        return GpuStats()
    drivers = [_open_driver(device, name) for name, device in devices.items()]
    return GpuStats(list(devices.values()), [driver for driver in drivers if driver is not None])


def _open_driver(device: torch.device, name: str) -> Driver | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # By its UUID, because CUDA_VISIBLE_DEVICES renumbers.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None
    return Driver(pynvml, handle, name)
