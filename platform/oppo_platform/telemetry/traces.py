"""Steps of a run as a Chrome trace from stored spans, like `oppo trace` from a run's own file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from oppo_contract.chrome_trace import chrome_trace
from oppo_contract.events import DecisionEvent, Event, SpansEvent, StartedEvent
from oppo_platform.runs.models import Run
from oppo_platform.telemetry.metric_reader import AttemptRange, attempt_ranges
from oppo_platform.telemetry.models import Decision
from oppo_platform.telemetry.timelines import MOST_DETAILED_STEPS, visible_spans

COLUMNS = ("device", "role", "phase", "start_s", "end_s", "chunk", "rows")


class TraceRangeError(Exception):
    """No recorded step in the range, or more than a trace may have; the message says which."""


def trace(run: Run, from_step: int, to_step: int) -> str:
    """The trace file of these steps: at most 50 recorded ones.

    Raises:
        NothingToTrace: there are none, or more.
    """
    parts = [
        (part, list(visible_spans(part, from_step, to_step).order_by("step")[: MOST_DETAILED_STEPS + 1]))
        for part in attempt_ranges(run)
    ]
    count = sum(len(rows) for _, rows in parts)
    if not 0 < count <= MOST_DETAILED_STEPS:
        many = f"are more than {MOST_DETAILED_STEPS} recorded steps" if count else "is no recorded step"
        raise TraceRangeError(f"There {many} from {from_step} to {to_step}. A trace holds 1 to {MOST_DETAILED_STEPS}.")
    events = [event for part, rows in parts if rows for event in _events(run, part, [row.data for row in rows])]
    return json.dumps(chrome_trace(events), separators=(",", ":"))


def _events(run: Run, part: AttemptRange, steps: list[dict[str, Any]]) -> Iterator[Event]:
    attempt, first, last = part.attempt, steps[0]["step"], steps[-1]["step"]
    yield StartedEvent(
        producer="engine",
        seq=1,
        time=attempt.engine_started_at or 0.0,
        devices=attempt.device_names,
        lanes=attempt.lanes,
        start_step=first - 1,
        total_steps=max(1, run.total_steps),
    )
    for data in filter(is_drawable, steps):
        yield SpansEvent.model_validate(data | {"kind": "spans", "producer": "engine", "seq": 1, "time": 0.0})
    for decision in Decision.objects.filter(attempt=attempt, step__range=(first, last), at__isnull=False).order_by("step", "id"):
        yield DecisionEvent.model_validate(
            {"producer": "engine", "seq": 1, "kind": "decision", "time": decision.at.timestamp() if decision.at else 0.0}
            | {name: getattr(decision, name) for name in ("step", "controller", "old", "new", "reason")}
        )


def is_drawable(data: dict[str, Any]) -> bool:
    """Whether every time is known and columns have equal lengths; a broken worker may send others."""
    length = len(data["device"])
    times = [*data["window_s"], *data["start_s"], *data["end_s"]]
    times += [time for _, _, *both in data["idle"] for time in both]
    times += [part[name] for part in data["deferred"] for name in ("start_s", "end_s")]
    times += [number for samples in data.get("counters", {}).values() for sample in samples for number in sample]
    flows = (end for flow in data.get("flows", []) for end in flow)
    return None not in times and all(len(data[name]) == length for name in COLUMNS) and all(0 <= end < length for end in flows)
