"""Spans of data-parallel ranks, which wait until the slowest one is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from oppo_contract.events import Phase, Role
from oppo_core.trace.recorder import Recorder, Span, Wait


class RankRecorder(Recorder):
    """A recorder of a process with one rank per device: each span ends for a device when its own work in it is done."""

    def __init__(self, devices: tuple[str, ...], clock: Callable[[], float]) -> None:
        super().__init__(devices, clock)
        self._waited: NDArray[np.float64] = np.zeros(len(devices))

    def add_waits(self, seconds: NDArray[np.float64]) -> None:
        """In the current span each device waits for so many seconds."""
        self._waited += seconds

    @contextmanager
    def span(self, role: Role, phase: Phase, chunk: int = 0, rows: int = 0) -> Iterator[None]:
        before = self._waited.copy()
        with super().span(role, phase, chunk, rows):
            yield
        waited = self._waited - before
        if waited.any():
            span = self.spans.pop()
            spans, waits = split_span(span, (1 - waited / (span.end - span.start)).tolist())
            self.spans += spans
            self.waits += waits


def split_span(span: Span, shares: Rows[float]) -> tuple[list[Span], list[Wait]]:
    """Consecutive pieces of `span`, each on the devices whose work is not done yet, and the waits of the others.

    All waits of a device are put at the end of the span: those of every decode step would outnumber all other spans. If different
    devices were the slowest in turn, the last piece has no device; it keeps the sum of the pieces at the time of the span.

    Args:
        shares: work of each device, relative to the length of the span.
    """
    spans: list[Span] = []
    waits: list[Wait] = []
    start = span.start
    for edge in sorted({*shares, 1.0}):
        end = span.end if edge >= 1 else max(span.start, span.start + edge * (span.end - span.start))
        if end > start:
            working = tuple(device for device, share in zip(span.devices, shares, strict=True) if share >= edge)
            chunk = span.chunk if working else 0  # no device has handed this piece to a scorer
            spans.append(span._replace(devices=working, start=start, end=end, chunk=chunk))
            start = end
        done = tuple(device for device, share in zip(span.devices, shares, strict=True) if share == edge)
        if done and end < span.end:
            waits.append(Wait(done, "tail", end, span.end))
    return spans or [span], waits
