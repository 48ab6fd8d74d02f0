"""Metrics in full resolution as reported, one line per step. Memory holds some thousand steps at a time."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence

from asgiref.sync import sync_to_async

from oppo_platform.runs.models import Run
from oppo_platform.telemetry.metric_reader import Parts, Range, attempt_ranges, read_points
from oppo_platform.telemetry.metric_writer import AXIS_KEYS
from oppo_platform.telemetry.selectors import expand_keys

STEPS_A_READ = 5000


async def export_metrics(run: Run, keys: Sequence[str], within: Range) -> AsyncIterator[bytes]:
    """Newline-delimited JSON: `{"step", "wall", "tokens", "gpu_seconds", key: value, …}`, ascending by step.

    A metric without a value in a step is absent from its line; a non-finite one is null. Steps without any metric are left out.
    """
    parts, names = {run.pk: await sync_to_async(attempt_ranges)(run)}, await sync_to_async(expand_keys)(run, keys)
    after, last = max(within.after, -1), min(within.until, run.step)
    while after < last:
        until = min(after + STEPS_A_READ, last)
        yield await sync_to_async(_lines)(run.pk, parts, names, Range(after, until))
        after = until


def _lines(run_id: int, parts: Parts, keys: list[str], within: Range) -> bytes:
    axes = {key: key.removeprefix("@") for key in AXIS_KEYS}
    rows: dict[int, dict[str, float | None]] = {}
    points = read_points(parts, [*keys, *axes], within)
    reported = {int(step) for key in keys if (run_id, key) in points for step in points[run_id, key][0]}
    for name in [*axes, *keys]:
        for step, value in zip(*points.get((run_id, name), ((), ())), strict=True):
            if int(step) in reported:
                rows.setdefault(int(step), {})[axes.get(name, name)] = float(value) if math.isfinite(value) else None
    lines = (json.dumps({"step": step, **rows[step]}, ensure_ascii=False) + "\n" for step in sorted(rows))
    return "".join(lines).encode()
