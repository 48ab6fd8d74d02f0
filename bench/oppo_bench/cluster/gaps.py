"""Fragmentation: free GPU-seconds while a gang waited that fits into the sum of the free devices.

A gang requests more than one device. Devices count by pool and kind, as gangs are not mixed. The reason of the wait does not
matter: devices scattered over nodes, reserved for another run, a quota, or the order of the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from oppo_bench.cluster.simulation import Outcome
from oppo_bench.cluster.trace import Span, overlap

Group = tuple[int, str]  # pool id, kind
Change = tuple[float, Group | None, str, int, int]  # instant, group of devices, kind and size of a gang, change


def fragmented_gpu_s(outcome: Outcome, span: Span) -> float:
    """GPU-seconds within a span."""
    free = Counter[Group]()
    for node in outcome.trace.nodes():
        for device in node.devices:
            free[node.pool_id, device.kind] += 1
    gangs: Counter[tuple[str, int]] = Counter()
    total, before = 0.0, span[0]
    for instant, changes in groupby(sorted(_changes(outcome), key=lambda change: change[0]), key=lambda change: change[0]):
        total += _idle(free, gangs) * overlap((before, instant), span)
        before = instant
        for _, group, kind, size, by in changes:
            if group is None:
                gangs[kind, size] += by
            else:
                free[group] += by
    return total


def _idle(free: Counter[Group], gangs: Counter[tuple[str, int]]) -> int:
    """Free devices of the groups into which a waiting gang would fit."""
    wanted = [gang for gang, count in gangs.items() if count]
    return sum(count for (_, own), count in free.items() if any(size <= count and kind in ("any", own) for kind, size in wanted))


def _changes(outcome: Outcome) -> Iterator[Change]:
    group_of = {d.device_id: (node.pool_id, d.kind) for node in outcome.trace.nodes() for d in node.devices}
    for hold in outcome.holds:
        group = group_of[hold.devices[0]]
        yield hold.start, group, "", 0, -len(hold.devices)
        yield hold.end, group, "", 0, len(hold.devices)
    for wait in outcome.waits:
        asked = outcome.trace.submissions[wait.run_id - 1]
        if asked.devices > 1:
            yield wait.start, None, asked.kind, asked.devices, 1
            yield wait.end, None, asked.kind, asked.devices, -1
