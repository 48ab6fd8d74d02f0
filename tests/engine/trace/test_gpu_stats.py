"""GPU statistics, with a fake NVML."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oppo_bench.engine.engine_runner import EngineRunner
from oppo_bench.engine.models import build_models
from oppo_bench.engine.workload import VARIANTS, Lengths, Load, Size, build_spec, write_prompts
from oppo_core.trace import gpu_stats
from oppo_core.trace.gpu_stats import Driver, GpuStats, build_gpu_stats, stated_flops


class NVMLError(Exception):
    """A metric is not supported."""


class Nvml:
    """One GPU. `sampled` is set after three utilization queries; GPM's counters increase with each sample."""

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_SM_OCCUPANCY = 2, 3
    NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 5, 10

    def __init__(self, supported: bool = True, has_counters: bool = True) -> None:
        self.supported, self.has_counters = supported, has_counters
        self.loads = iter([20, 40] + [60] * 10_000)
        self.sampled, self.times = threading.Event(), 0
        self.freed: list[list[int]] = []

    def nvmlDeviceGetUtilizationRates(self, _handle: int) -> Any:
        self.times += 1
        if self.times > 2:
            self.sampled.set()
        if not self.supported:
            raise NVMLError
        return SimpleNamespace(gpu=next(self.loads))

    def nvmlDeviceGetMemoryInfo(self, _handle: int) -> Any:
        return SimpleNamespace(used=3_500_000_000)

    def nvmlGpmQueryDeviceSupport(self, _handle: int) -> Any:
        return SimpleNamespace(isSupportedDevice=self.has_counters)

    def nvmlGpmSampleAlloc(self) -> list[int]:
        return [0]

    def nvmlGpmSampleGet(self, _handle: int, sample: list[int]) -> None:
        sample[0] = time.monotonic_ns()

    def nvmlGpmSampleFree(self, sample: list[int]) -> None:
        self.freed.append(sample)

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=1, value=0.0) for _ in range(8)])

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        assert request.sample1[0] < request.sample2[0]
        for metric in request.metrics[: request.numMetrics]:
            metric.value = 10.0 * metric.metricId
            metric.nvmlReturn = 0 if metric.metricId != self.NVML_GPM_METRIC_ANY_TENSOR_UTIL else 3  # unsupported
        return request


def test_utilization_memory_and_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stats, "MIN_WINDOW_S", 0.0)
    nvml = Nvml()
    stats = Driver(nvml, 0, "cuda:0", every_s=0.001)
    assert nvml.sampled.wait(10)
    metrics = stats.take()
    stats.close()
    assert 0.2 <= metrics.pop("nvml/cuda:0/utilization") <= 0.6
    assert metrics == {
        "nvml/cuda:0/memory_gb": 3.5, "gpm/cuda:0/sm_util": 0.2, "gpm/cuda:0/sm_occupancy": 0.3, "gpm/cuda:0/dram_util": 1.0,
    }  # fmt: skip
    assert len(nvml.freed) == 2


def test_no_counters_in_a_short_window() -> None:
    stats = Driver(Nvml(), 0, "cuda:0", every_s=60)
    assert stats.take() == {"nvml/cuda:0/memory_gb": 3.5}
    stats.close()


def test_unsupported_metrics_are_omitted() -> None:
    nvml = Nvml(supported=False, has_counters=False)
    stats = Driver(nvml, 0, "cuda:0", every_s=0.001)
    assert nvml.sampled.wait(10)
    assert stats.take() == {"nvml/cuda:0/memory_gb": 3.5}
    stats.close()


def test_no_statistics_without_a_gpu() -> None:
    stats = build_gpu_stats({"cpu:0": torch.device("cpu")})
    assert stats.take() == {}
    stats.close()


def test_memory_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, held in {"max_memory_allocated": [2e9, 1e9], "max_memory_reserved": [3e9, 4e9]}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, held=held: held[device.index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    gpus = [torch.device("cuda", number) for number in (0, 1)]
    one, both = GpuStats(gpus[:1], []), GpuStats(gpus, [])
    assert one.take() == {"perf/max_memory_allocated_gb": 2.0, "perf/max_memory_reserved_gb": 3.0}
    assert both.take() == {"perf/max_memory_allocated_gb": 2.0, "perf/max_memory_reserved_gb": 4.0}
    assert one.flops_per_s == 989e12
    both.close()


def test_no_peak_rate_for_an_unknown_gpu() -> None:
    assert stated_flops("NVIDIA H100 PCIe") == 756e12
    assert stated_flops("NVIDIA H200") == 989e12
    assert stated_flops("Some card") is None


class FixedStats:
    """GPU statistics with one constant metric."""

    flops_per_s: float | None = 1e12
    closed = False

    def take(self) -> dict[str, float]:
        return {"nvml/cuda:0/utilization": 0.5}

    def close(self) -> None:
        self.closed = True


def test_gpu_statistics_are_in_the_step_event(tmp_path: Path) -> None:
    load = Load("T", Size.tiny(16, 1, 2), 4, Lengths(seed=3, median=6, longest=24), max_age=1, chunk=4)
    spec = build_spec(load, VARIANTS["sequential"], build_models(load.size, tmp_path, 3), write_prompts(tmp_path, 3))
    runner, stats = EngineRunner("sequential", spec, load.lengths, tmp_path / "out", 1), FixedStats()
    runner.engine.hardware = stats
    runner.step()
    metrics = runner.journal.newest["step"]["metrics"]
    rows = runner.journal.newest["spans"]["trained"]
    runner.close()
    assert metrics["nvml/cuda:0/utilization"] == 0.5
    operations = 6 * runner.engine.parameters * sum(prompt + response for _, prompt, response in rows)
    seconds = metrics["timing_s/adv"] + metrics["timing_s/update_actor"]
    assert metrics["perf/mfu/actor"] == pytest.approx(operations / seconds / 1e12)
    assert stats.closed
