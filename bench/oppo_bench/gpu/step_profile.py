"""The kernels of one step by torch's profiler (`python bench/gpu --profile`).

The profiler slows the host down, so shares of a step that the host limits are lower than without it; counts are exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

SHOWN, NAME_WIDTH = 12, 90
NS = 1e-9
COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one kernel, or of one function of the CUDA runtime, and their time in seconds."""

    name: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A step's kernels (with copies and memsets) and runtime calls, the longest in total first.

    `seconds`: from the first kernel's start to the last one's end; `busy_seconds`: the part of it in which at least one ran.
    """

    seconds: float
    busy_seconds: float
    kernels: list[Calls]
    host: list[Calls]

    @property
    def count(self) -> int:
        """The number of kernels, without copies and memsets."""
        return sum(kernel.count for kernel in self.kernels if not kernel.name.startswith(COPIES))

    @property
    def busy(self) -> float:
        """Share of the time in which a kernel or copy ran."""
        return self.busy_seconds / self.seconds if self.seconds else 0.0

    def lines(self, name: str) -> list[str]:
        """Lines of output for the variant `name`."""
        head = (
            f"{name}: {self.count:,} kernels in {1e3 * self.seconds:,.0f} ms; a kernel or copy runs {self.busy:.0%} of the time"
        )
        return [
            head,
            *(_line("kernel", calls) for calls in self.kernels[:SHOWN]),
            *(_line("host", calls) for calls in self.host[: SHOWN // 3]),
        ]


def profile_step(step: Callable[[], object], device: torch.device) -> StepProfile:
    """Run `step` under the profiler. Without a GPU torch's operators stand for kernels, to try the command."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        step()
    # Not `profiler.events()`, which takes a minute for a million kernels.
    recorded: Any = profiler.profiler
    return read(recorded.kineto_results.events(), device.type == "cuda")


def read(events: list[Any], on_gpu: bool) -> StepProfile:
    """The profile of kineto's events."""
    kernels: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    host: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    spans: list[tuple[int, int]] = []
    for event in events:
        on_device, took = "CUDA" in str(event.device_type()), event.duration_ns()
        if on_device == on_gpu and not event.is_user_annotation():
            spans.append((event.start_ns(), event.start_ns() + took))
            _add(kernels[event.name()[:NAME_WIDTH]], took)
        elif event.name().startswith("cu"):
            _add(host[event.name()], took)
    spans.sort()
    seconds = NS * (max(end for _, end in spans) - spans[0][0]) if spans else 0.0
    return StepProfile(seconds, NS * _covered(spans), _sorted(kernels), _sorted(host))


def _add(total: list[int], nanoseconds: int) -> None:
    """Count one more call."""
    total[0] += 1
    total[1] += nanoseconds


def _covered(spans: list[tuple[int, int]]) -> int:
    """Length of the union of spans that are sorted by their start."""
    total, reached = 0, 0
    for start, end in spans:
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _sorted(calls: dict[str, list[int]]) -> list[Calls]:
    listed = [Calls(name, count, NS * nanoseconds) for name, (count, nanoseconds) in calls.items()]
    return sorted(listed, key=lambda each: -each.seconds)


def _line(kind: str, calls: Calls) -> str:
    each = 1e6 * calls.seconds / calls.count
    return f"  {kind:6} {1e3 * calls.seconds:9.1f} ms {calls.count:8,} × {each:8.1f} µs  {calls.name}"
