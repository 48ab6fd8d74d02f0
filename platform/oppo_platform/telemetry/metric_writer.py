"""Writes points: a batch of steps becomes one hot row per series, by COPY."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from django.conf import settings
from django.db import connection

from oppo_contract.events import StepEvent
from oppo_platform.runs.models import Attempt
from oppo_platform.telemetry.blocks import pack_points
from oppo_platform.telemetry.models import Series

Axis = Literal["step", "wall", "tokens", "gpu_seconds"]
# Key of an axis series → field of the step event. Metric keys cannot contain `@` (`oppo_contract.events.MetricKey`).
AXIS_KEYS = {"@wall": "elapsed_s", "@tokens": "generated_tokens", "@gpu_seconds": "device_seconds"}
Column = tuple["array[int]", "array[float]"]
COPY_HOT = "COPY telemetry_hotpoints (series_id, first_step, last_step, data) FROM STDIN (FORMAT BINARY)"


def write_steps(attempt: Attempt, events: Sequence[StepEvent]) -> list[str]:
    """Store the metrics and axes of some steps; returns the keys that were not stored because the run has too many.

    Runs in the transaction and under the lock of `ingest`: an attempt's points of one series arrive in order.
    """
    columns = _columns(events)
    ids = _series_ids(attempt, list(columns))
    with connection.cursor() as cursor, cursor.copy(COPY_HOT) as copy:
        copy.set_types(["int8", "int4", "int4", "bytea"])
        for key, (steps, values) in columns.items():
            if key in ids:
                data = pack_points(np.asarray(steps), np.asarray(values))
                copy.write_row((ids[key], min(steps), max(steps), data))
    return [key for key in columns if key not in ids]


def _columns(events: Iterable[StepEvent]) -> dict[str, Column]:
    """The steps' metrics and axes by key."""
    result: dict[str, Column] = defaultdict(lambda: (array("i"), array("d")))
    for event in events:
        axes = {key: getattr(event, field) for key, field in AXIS_KEYS.items()}
        for key, value in (axes | event.metrics).items():
            steps, values = result[key]
            steps.append(event.step)
            values.append(value)
    return result


def _series_ids(attempt: Attempt, keys: list[str]) -> dict[str, int]:
    """Ids of the series, created if missing and the run's limit allows more."""
    known = dict(Series.objects.filter(attempt=attempt).values_list("key", "id"))
    missing = [key for key in keys if key not in known]
    if missing:
        room = max(0, settings.OPPO_MOST_SERIES + len(AXIS_KEYS) - len(known))
        made = Series.objects.bulk_create(Series(attempt=attempt, key=key) for key in missing[:room])
        known |= {series.key: series.pk for series in made}
    return known
