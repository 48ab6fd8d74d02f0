"""Speed of devices by the name that their driver reports: vendors' data sheets for GPUs, a measured core for CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from oppo_contract.spec import RunSpec


class Gpu(NamedTuple):
    """Stated peak rate of dense bfloat16 products, operations per second, and memory bandwidth, bytes per second."""

    flops: float
    bandwidth: float


# By a part of the driver's name; the first that matches counts.
GPUS = {
    "B200": Gpu(2250e12, 8.0e12), "GH200": Gpu(990e12, 4.0e12), "H200": Gpu(989e12, 4.8e12), "H100 PCIe": Gpu(756e12, 2.0e12),
    "H100": Gpu(989e12, 3.35e12), "A100": Gpu(312e12, 2.04e12), "L40S": Gpu(362e12, 0.86e12), "A10": Gpu(125e12, 0.6e12),
    "L40": Gpu(181e12, 0.86e12), "L4": Gpu(121e12, 0.3e12),
}  # fmt: skip
FLOAT32_SHARE = 1 / 15  # of a GPU's bfloat16 rate: 67 of 989 TFLOP/s on an H100
MODEL_FLOPS_SHARE = 0.4  # of the stated rate in training, as in docs/simulation.md
# Of one layer in a decode step, besides reading its weights: our decoder with CUDA graphs, and launched from Python where
# sampling filters need the host (both on an H100: docs/measurements/2026-11-27.md); vLLM's kernels (`round_us` in
# docs/simulation.md).
GRAPH_LAYER_S, HOST_LAYER_S, VLLM_LAYER_S = 190e-6, 2790e-6, 150e-6


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one device, or of one core.

    `flops`: sustained in large passes, per second; `decode_flops`: in decode steps; `bandwidth`: bytes a second; `layer_s`: time
    of one layer in a decode step besides these.
    """

    flops: float
    decode_flops: float
    bandwidth: float
    layer_s: float


# oppo_estimate/machines/cpu-2-s.yaml and cpu-2-m.yaml: one core of a server, float32.
CORE = Speed(flops=100e9, decode_flops=60e9, bandwidth=20e9, layer_s=300e-6)


def stated_gpu(name: str) -> Gpu | None:
    """The data sheet's rates of a GPU; None if it is not in the table."""
    return next((gpu for part, gpu in GPUS.items() if part in name), None)


def device_speed(name: str, kind: str, spec: RunSpec) -> Speed | None:
    """Speed of a device for a run by its kind, `cuda` or `cpu`, and its driver's name; None for an unknown GPU."""
    if kind != "cuda":
        return CORE
    gpu = stated_gpu(name)
    if gpu is None:
        return None
    peak = gpu.flops * (1 if spec.resources.dtype == "bfloat16" else FLOAT32_SHARE)
    ours = HOST_LAYER_S if spec.rollout.has_sampling_mask else GRAPH_LAYER_S
    return Speed(MODEL_FLOPS_SHARE * peak, peak, gpu.bandwidth, VLLM_LAYER_S if spec.rollout.backend == "vllm" else ours)
