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
class Decision:
    """A plan's decision for one run. `start`: expected start of a waiting run; None: unknown, or immediate."""

    verb: Literal["start", "stop", "wait"]
    run_id: int
    code: str
    text: str
    start: datetime | None = None


@dataclass(frozen=True, slots=True)
class PlanLine:
    """A decision with its run."""

    decided: Decision
    run: str
    team: str
    priority: int
    devices: int


def present_plan() -> Decisions:
    """The plan of a cycle at this moment; nothing is changed."""
    now = clock.now()
    return plan(build_snapshot(now), now.timestamp())


def explain_plan(decisions: Decisions) -> list[PlanLine]:
    """The plan's lines: starts, stops, then the queue in its order. Runs deleted since are left out."""
    given = {device_id for placement in decisions.placements for device_id in placement.device_ids}
    devices = Device.objects.filter(pk__in=given).select_related("node").in_bulk()
    decided = [*_starts(decisions, devices), *_stops(decisions), *_waits(decisions)]
    runs = Run.objects.select_related("project__team").defer("spec").in_bulk([each.run_id for each in decided])
    return [
        PlanLine(each, run.name, run.project.team.name, run.priority, run.devices)
        for each in decided
        if (run := runs.get(each.run_id)) is not None
    ]


def _starts(decisions: Decisions, devices: Mapping[int, Device]) -> Iterator[Decision]:
    for placement in decisions.placements:
        text = f"on {_where(placement, devices)}"
        if placement.backfill is None:
            yield Decision("start", placement.run_id, "free", text)
        else:
            until = datetime.fromtimestamp(placement.backfill.until, UTC)
            text += f", backfilled ahead of run {placement.backfill.for_run_id}, which starts by {until:%H:%M:%S} UTC"
            yield Decision("start", placement.run_id, "backfill", text)


def _where(placement: Placement, devices: Mapping[int, Device]) -> str:
    nodes: dict[str, list[str]] = {}
    for device in (devices[device_id] for device_id in placement.device_ids if device_id in devices):
        nodes.setdefault(device.node.name, []).append(f"{device.kind}:{device.index}")
    return "; ".join(f"{name} ({', '.join(places)})" for name, places in nodes.items())


def _stops(decisions: Decisions) -> Iterator[Decision]:
    for victim in decisions.preemptions:
        yield Decision("stop", victim.run_id, victim.code, f"for run {victim.for_run_id}: {victim.text}")


def _waits(decisions: Decisions) -> Iterator[Decision]:
    for run_id in decisions.order:
        reason = decisions.reasons[run_id]
        start = None if reason.estimated_start is None else datetime.fromtimestamp(reason.estimated_start, UTC)
        yield Decision("wait", run_id, reason.code, reason.text, start)
