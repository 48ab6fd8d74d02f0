"""Sentences about a plan, for `oppo scheduler --explain`: starts, preemptions, and reasons of waiting runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from oppo_platform import clock
from oppo_platform.cluster.models import Device
from oppo_platform.runs.models import Run
from oppo_platform.scheduling.build_snapshot import build_snapshot
from oppo_platform.scheduling.policy import Decisions, Placement, plan


@dataclass(frozen=True, slots=True)
class PlanLine:
    """A plan's decision for one run. `start`: expected start of a waiting run; None: unknown, or immediate."""

    verb: Literal["start", "stop", "wait"]
    run_id: int
    code: str
    text: str
    start: datetime | None = None


def current_plan() -> Decisions:
    """The plan of a cycle at this moment; nothing is changed."""
    now = clock.now()
    return plan(build_snapshot(now), now.timestamp())


def explain_plan(decisions: Decisions) -> list[tuple[PlanLine, Run]]:
    """The plan's lines with their runs: starts, stops, then the queue in its order. Deleted runs are left out."""
    placed = {device_id for placement in decisions.placements for device_id in placement.device_ids}
    devices = Device.objects.filter(pk__in=placed).select_related("node").in_bulk()
    lines = [*_starts(decisions, devices), *_stops(decisions), *_waits(decisions)]
    runs = Run.objects.select_related("project__team").defer("spec").in_bulk([line.run_id for line in lines])
    return [(line, runs[line.run_id]) for line in lines if line.run_id in runs]


def _starts(decisions: Decisions, devices: Mapping[int, Device]) -> Iterator[PlanLine]:
    for placement in decisions.placements:
        code, text = "free", f"on {_where(placement, devices)}"
        if placement.backfill is not None:
            code, until = "backfill", datetime.fromtimestamp(placement.backfill.until, UTC)
            text += f", backfilled ahead of run {placement.backfill.for_run_id}, which starts by {until:%H:%M:%S} UTC"
        yield PlanLine("start", placement.run_id, code, text)


def _where(placement: Placement, devices: Mapping[int, Device]) -> str:
    nodes: dict[str, list[str]] = {}
    for device in (devices[device_id] for device_id in placement.device_ids if device_id in devices):
        nodes.setdefault(device.node.name, []).append(f"{device.kind}:{device.index}")
    return "; ".join(f"{name} ({', '.join(places)})" for name, places in nodes.items())


def _stops(decisions: Decisions) -> Iterator[PlanLine]:
    for victim in decisions.preemptions:
        yield PlanLine("stop", victim.run_id, victim.code, f"for run {victim.for_run_id}: {victim.text}")


def _waits(decisions: Decisions) -> Iterator[PlanLine]:
    for run_id in decisions.order:
        reason = decisions.reasons[run_id]
        start = None if reason.estimated_start is None else datetime.fromtimestamp(reason.estimated_start, UTC)
        yield PlanLine("wait", run_id, reason.code, reason.text, start)
