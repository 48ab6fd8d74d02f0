"""The waiting runs as the policy sees them. There may be ten thousand, so a process keeps them and reads only what has changed.

PostgreSQL writes a new version of a row with every update; `xmin` and `ctid` (transaction and place) identify it. The names of
ten thousand versions are read in one value, in a fraction of the time that the rows take.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from typing import Any

from django.db import connection
from django.db.models import TextField
from django.db.models.functions import Cast

from oppo_contract.states import RunState
from oppo_contract.wire import ANY_HUB_MODEL
from oppo_platform.clock import Posix
from oppo_platform.projects.models import Project
from oppo_platform.runs.models import Run
from oppo_platform.scheduling import policy

MOST_WAITING = 20_000
# All runs are read this often, seconds: after a restore transaction ids are assigned again.
READ_ALL_S = 60.0
# Plain rows instead of model instances: with ten thousand queued runs instances alone would take longer than the plan.
WAITING = (
    "id", "project__team_id", "priority", "devices", "needs_text", "queued_s", "preemptible",
    "max_runtime_s", "step", "total_steps", "elapsed_s", "excluded_text", "not_before_s",
)  # fmt: skip
# The team is the project's, so it is part of a run's version.
VERSIONS = f"""
    SELECT string_agg(id || ':' || team_id || ':' || xmin || ctid, ' ')
      FROM (SELECT run.id, project.team_id, run.xmin, run.ctid FROM {Run._meta.db_table} AS run
              JOIN {Project._meta.db_table} AS project ON project.id = run.project_id
             WHERE run.state = %s ORDER BY run.priority DESC, run.queued_at, run.id LIMIT {MOST_WAITING}) AS queued
"""  # noqa: S608 - no input


class WaitingRuns:
    """The waiting runs, read from the database once per version.

    `changed`: the runs that the last `read` found changed since the one before, new ones included.
    """

    def __init__(self) -> None:
        self.changed: frozenset[int] = frozenset()
        self._kept: dict[str, tuple[int, policy.WaitingRun]] = {}
        self._last: tuple[str, dict[int, policy.WaitingRun]] | None = None  # the last versions and their runs
        self._since = time.monotonic()

    def read(self) -> dict[int, policy.WaitingRun]:
        """The present waiting runs by id, without their homes and preemptions."""
        with connection.cursor() as cursor:
            cursor.execute(VERSIONS, [RunState.QUEUED])
            text: str = cursor.fetchone()[0] or ""
        last, known = self._last, self._kept
        is_due = time.monotonic() - self._since > READ_ALL_S
        if last is not None and last[0] == text and not is_due:
            self.changed = frozenset()
            return dict(last[1])
        versions = text.split()
        self.changed = frozenset(_run_id(version) for version in versions if version not in known)
        if is_due:
            known, self._since = {}, time.monotonic()
        new = {_run_id(version): version for version in versions if version not in known}
        kept = {version: known[version] for version in versions if version in known}
        if new:
            kept |= {new[run_id]: (run_id, run) for run_id, run in _read(list(new)).items()}
        runs = dict(kept.values())
        complete = len(runs) == len(versions)  # a run that is not found has changed meanwhile
        self._kept, self._last = kept, (text, runs) if complete else None  # each at once: several threads may read
        return dict(runs)


def _run_id(version: str) -> int:
    return int(version.partition(":")[0])


def parse_needs(needs: dict[str, Any]) -> tuple[str, int | None, frozenset[policy.Need]]:
    """Device kind, exact number of nodes (None: one), and required models and prompts, from `Run.needs`."""
    nodes: int = needs.get("nodes", 1)  # older runs have no entry
    items = [
        *([("hub", ANY_HUB_MODEL)] if needs.get("hub") else []),
        *(("model", m) for m in needs["models"]),
        *(("prompts", p) for p in needs["prompts"]),
    ]
    return needs["kind"], nodes if nodes > 1 else None, frozenset(items)


@functools.lru_cache(maxsize=1024)
def _needs(text: str) -> tuple[str, int | None, frozenset[policy.Need]]:
    """`parse_needs` of JSON, cached: few runs differ."""
    return parse_needs(json.loads(text))


@functools.lru_cache(maxsize=1024)
def _numbers(text: str) -> frozenset[int]:
    return frozenset(json.loads(text))


def steps_per_s(steps: int, seconds: float) -> float | None:
    """Steps per second so far; None before the first."""
    return steps / seconds if steps and seconds > 0 else None


def _read(run_ids: Sequence[int]) -> dict[int, policy.WaitingRun]:
    """Those of these runs that wait."""
    queued = Run.objects.filter(state=RunState.QUEUED, pk__in=run_ids).annotate(
        needs_text=Cast("needs", TextField()), excluded_text=Cast("excluded_nodes", TextField()),
        queued_s=Posix("queued_at"), not_before_s=Posix("not_before"),
    )  # fmt: skip
    return {row["id"]: _waiting_run(row) for row in queued.values(*WAITING)}


def _waiting_run(row: dict[str, Any]) -> policy.WaitingRun:
    kind, nodes, needs = _needs(row["needs_text"])
    return policy.WaitingRun(
        run_id=row["id"],
        team_id=row["project__team_id"],
        devices=row["devices"],
        priority=row["priority"],
        kind=kind,
        nodes=nodes,
        needs=needs,
        # Its place in the queue: kept across preemptions and retries, new after a user's pause and resume.
        submitted_at=row["queued_s"],
        preemptible=row["preemptible"],
        max_runtime_s=row["max_runtime_s"],
        steps_left=row["total_steps"] - row["step"],
        steps_per_s=steps_per_s(row["step"], row["elapsed_s"]),
        excluded_nodes=_numbers(row["excluded_text"]),
        not_before=row["not_before_s"],
    )
