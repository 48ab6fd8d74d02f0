"""Queries of runs: the summary that lists, pages, the API and the live stream share. None of them reads a metric series.

For pages: `list_runs(user, …)`, `get_run(user, id)` (raises `Run.DoesNotExist`, answer 404), `run_summary(run)`,
`spec_yaml(run)`. A user sees the runs of their teams only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import lru_cache
from types import NoneType
from typing import Any, Literal

from django.conf import settings
from django.contrib.postgres.expressions import ArraySubquery
from django.core.exceptions import ValidationError
from django.db.models import F, Func, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce, Least
from typing_extensions import TypedDict

from oppo_contract.spec import load_spec
from oppo_contract.spec_errors import SpecError
from oppo_contract.states import HOLDING_DEVICES, RunState
from oppo_contract.yaml_text import dump_yaml
from oppo_platform import clock
from oppo_platform.accounts.models import User
from oppo_platform.clock import iso
from oppo_platform.cursors import BadCursor, read_cursor, write_cursor
from oppo_platform.projects.models import Project
from oppo_platform.runs.access import visible_runs
from oppo_platform.runs.allowed_actions import RunAction, allowed_actions
from oppo_platform.runs.filtering import apply_list_filter, sort_expression
from oppo_platform.runs.models import LIVE_ATTEMPT, Attempt, Checkpoint, Launch, LaunchState, Run

MOST_RUNS_A_PAGE = 200
# Annotations that apps above `runs` add to summaries, by name; set in `AppConfig.ready`.
MOST_PROVENANCES = 100
ANNOTATIONS: dict[Literal["open_alerts", "is_silent"], Callable[[], Any]] = {}


class OpenAlert(TypedDict):
    """An open alert in a run's summary."""

    id: int
    condition: str
    why: str
    acknowledged_by: str | None


class ComparedRun(TypedDict):
    """A run's summary without its metrics. Times are ISO 8601 in UTC; None if unknown."""

    id: int
    name: str
    project: str
    team: str
    state: str
    reason: str
    created_at: str
    started_at: str | None
    ended_at: str | None
    step: int
    attempt: int | None
    total_steps: int
    elapsed_s: float
    eta_s: float | None
    cursor: int
    bubble: float | None
    tags: list[str]
    target_reward: float | None
    preset: str
    forked_from: dict[str, int] | None
    user: str
    devices: int
    nodes: int
    where: list[str]
    lost_contact_at: str | None
    alerts: list[OpenAlert]
    silent: bool
    archived: bool
    priority: int
    queued_at: str
    max_runtime_s: float | None
    wishes: dict[RunAction, str]
    error: str
    last_log_lines: list[str]
    url: str


class RunSummary(ComparedRun):
    """The fields that all views of a run share (docs/interfaces.md); `latest`: the newest value of each metric."""

    latest: dict[str, float | None]


class RunList(TypedDict):
    """One page of runs; `next` is the `cursor` of the following one."""

    items: list[RunSummary]
    next: str | None


def run_url(run_id: int) -> str:
    """URL of the run's page."""
    return f"/runs/{run_id}"


def run_summary(run: Run) -> RunSummary:
    """The summary of a run from one of this module's querysets (project, team and user joined)."""
    return RunSummary(**compared_run(run), latest=run.latest)


def compared_run(run: Run) -> ComparedRun:
    """`run_summary` without `latest`, which may contain thousands of metrics."""
    return ComparedRun(
        id=run.pk,
        name=run.name,
        project=run.project.name,
        team=run.project.team.name,
        state=run.state,
        reason=run.reason,
        created_at=iso(run.created_at),
        started_at=iso(run.started_at) if run.started_at else None,
        ended_at=iso(run.ended_at) if run.ended_at else None,
        step=run.step,
        attempt=run.reporting_attempt,  # type: ignore[attr-defined]  # by `_with_summary_fields`
        total_steps=run.total_steps,
        elapsed_s=run.elapsed_s,
        eta_s=eta_s(run),
        cursor=run.cursor,
        bubble=run.bubble,
        tags=run.tags,
        target_reward=run.target_reward,
        preset=run.preset,
        forked_from={"run": run.forked_run, "step": run.forked_step or 0} if run.forked_run is not None else None,
        user=run.user.username,
        devices=run.devices,
        nodes=run.needs.get("nodes", 1),
        where=_where(run),
        lost_contact_at=iso(lost) if (lost := run.lost_contact_at) else None,  # type: ignore[attr-defined]
        alerts=run.open_alerts,  # type: ignore[attr-defined]  # by `ANNOTATIONS`
        silent=run.is_silent,  # type: ignore[attr-defined]  # so is this
        archived=run.archived_at is not None,
        priority=run.priority,
        queued_at=iso(run.queued_at),
        max_runtime_s=run.max_runtime_s,
        wishes=allowed_actions(run.state, run.max_runtime_s is not None, run.saved_step),  # type: ignore[attr-defined]
        error=run.error,
        last_log_lines=run.last_log_lines,
        url=run_url(run.pk),
    )


def _where(run: Run) -> list[str]:
    """Names of its nodes, the first one first, also after its end; none while it waits or is paused."""
    if run.state in (RunState.QUEUED, RunState.PAUSED):
        return []
    head: str | None = run.head_node  # type: ignore[attr-defined]  # as the next one, by `_with_summary_fields`
    others: list[str] = run.other_nodes  # type: ignore[attr-defined]
    return [head, *others] if head else []


def eta_s(run: Run) -> float | None:
    """Remaining seconds of training at the run's mean pace, while it holds devices and has trained a step."""
    if run.state not in HOLDING_DEVICES or run.step == 0:
        return None
    return run.elapsed_s / run.step * (run.total_steps - run.step)


def summaries() -> QuerySet[Run]:
    """All runs with what `run_summary` needs, without the large columns."""
    return full_summaries().defer("spec", "plan", "notes")


def full_summaries() -> QuerySet[Run]:
    """The same with the large columns."""
    runs = _with_summary_fields(settings.OPPO_NODE_FRESH_S).all()
    runs.query.annotations = {name: _copy_annotation(expression) for name, expression in runs.query.annotations.items()}
    return runs


def _copy_annotation(expression: Any) -> Any:
    """An annotation with subqueries of its own: compiling one changes it, and requests are answered in threads."""
    copied = expression.copy()  # of a subquery with its query
    if not isinstance(copied, Subquery):
        sources = copied.get_source_expressions()
        copied.set_source_expressions(
            [_copy_annotation(each) if isinstance(each, (Func, Subquery)) else each for each in sources]
        )
    return copied


@lru_cache
def _with_summary_fields(fresh_s: float) -> QuerySet[Run]:
    """With project, team, user, the names of the newest attempt's nodes, the newest attempt with a step, and open alerts.

    `saved_step` is the step of `attempts.latest_checkpoint`; `lost_contact_at` the last heartbeat of the node that
    has been silent longest, if that was more than `fresh_s` seconds ago. Cached, because Django takes as long to resolve these
    annotations as to compile and run the query.
    """
    newest = {"run": OuterRef("pk"), "epoch": OuterRef("epochs")}
    reporting = Attempt.objects.filter(run=OuterRef("pk"), first_step__isnull=False).order_by("-epoch")
    saved = Checkpoint.objects.filter(run=OuterRef("pk"), attempt__epoch__gt=OuterRef("begins_after")).order_by("-step")
    further = {f"attempt__{name}": value for name, value in newest.items()}
    lost = {"seen_at__lt": clock.now_in_query() - timedelta(seconds=fresh_s)}
    head_lost = Attempt.objects.filter(**newest, **lost, state__in=LIVE_ATTEMPT)
    other_lost = Launch.objects.filter(**further, **lost, state=LaunchState.CLAIMED).order_by("seen_at")
    return Run.objects.select_related("project__team", "user").annotate(
        head_node=Subquery(Attempt.objects.filter(**newest).values("node__name")[:1]),
        other_nodes=ArraySubquery(Launch.objects.filter(**further).order_by("rank").values("node__name")),
        lost_contact_at=Least(Subquery(head_lost.values("seen_at")[:1]), Subquery(other_lost.values("seen_at")[:1])),
        reporting_attempt=Subquery(reporting.values("epoch")[:1]),
        saved_step=Coalesce(Subquery(saved.values("step")[:1]), F("begins_with__step")),
        **{name: expression() for name, expression in ANNOTATIONS.items()},
    )


def list_runs(
    user: User,
    *,
    states: Iterable[str] = (),
    project: Project | int | None = None,
    team_id: int | None = None,
    where: str = "",
    sort: str = "",
    limit: int = 50,
    cursor: str = "",
    without: Iterable[int] = (),
) -> RunList:
    """The user's runs, newest first unless sorted otherwise.

    Args:
        states: only these states; all if empty.
        project: only this project (an id is enough).
        team_id: only this team.
        where: a filter (`runs.filtering`); archived runs are left out unless it mentions them.
        sort: a name of `filtering.sort_expression`, ascending; with a leading `-` descending. Runs without a value come last.
        cursor: the `next` of the previous page.
        without: ids to leave out.

    Raises:
        FilterError: invalid filter or column. BadCursor: invalid cursor.
    """
    runs = apply_list_filter(visible_runs(user, summaries()), where)
    requested = list(states)
    if requested:
        runs = runs.filter(state__in=requested)
    if project is not None:
        runs = runs.filter(project=project)
    if team_id is not None:
        runs = runs.filter(project__team_id=team_id)
    if left_out := list(without):
        runs = runs.exclude(pk__in=left_out)
    limit = max(1, min(limit, MOST_RUNS_A_PAGE))
    result = list(_ordered(runs, sort, cursor)[: limit + 1])
    items = [run_summary(run) for run in result[:limit]]
    return RunList(items=items, next=_place(result[limit - 1], sort) if len(result) > limit else None)


def _ordered(runs: QuerySet[Run], sort: str, cursor: str) -> QuerySet[Run]:
    """Sorted, after the cursor's position. Raises FilterError and BadCursor."""
    if not sort:
        return (runs.filter(pk__lt=read_cursor(cursor, int)[0]) if cursor else runs).order_by("-id")
    falls = sort.startswith("-")
    column = sort_expression(sort.removeprefix("-"))
    by = F("sorted_by").desc(nulls_last=True) if falls else F("sorted_by").asc(nulls_last=True)
    runs = runs.annotate(sorted_by=column).order_by(by, "-id")
    if not cursor:
        return runs
    run_id, value = read_cursor(cursor, int, (int, float, str, NoneType))
    if value is None:
        return runs.filter(sorted_by__isnull=True, pk__lt=run_id)
    try:
        beyond = Q(sorted_by__lt=value) if falls else Q(sorted_by__gt=value)
        return runs.filter(beyond | Q(sorted_by=value, pk__lt=run_id) | Q(sorted_by__isnull=True))
    except (ValueError, TypeError, ValidationError):  # of another column's page
        raise BadCursor from None


def _place(run: Run, sort: str) -> str:
    """The cursor at the end of a page: the run, and its sort value."""
    if not sort:
        return write_cursor(run.pk)
    value = run.sorted_by  # type: ignore[attr-defined]  # by `_ordered`
    return write_cursor(run.pk, value.isoformat() if isinstance(value, datetime) else value)


def visible_run(user: User, run_id: int) -> Run:
    """One run without the joins of its summary, in a third of the time. Raises `Run.DoesNotExist` as `get_run` does."""
    return visible_runs(user).select_related("project").get(pk=run_id)


def get_run(user: User, run_id: int) -> Run:
    """One run with everything. Raises `Run.DoesNotExist`, also for another team's."""
    return visible_runs(user, full_summaries()).get(pk=run_id)


def get_runs(user: User, run_ids: Iterable[int]) -> list[Run]:
    """Several runs in the given order. Raises `Run.DoesNotExist` when one of them does not exist."""
    ids = list(dict.fromkeys(run_ids))
    result = visible_runs(user, full_summaries()).in_bulk(ids)
    if len(result) < len(ids):
        raise Run.DoesNotExist(f"No run {next(i for i in ids if i not in result)}.")
    return [result[run_id] for run_id in ids]


def existing_runs(user: User, run_ids: Iterable[int]) -> list[Run]:
    """Those of several runs that exist, for lists, in the given order."""
    ids = list(run_ids)
    result = visible_runs(user, summaries()).in_bulk(ids) if ids else {}
    return [result[run_id] for run_id in ids if run_id in result]


def load_specs(run_ids: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Specs of listed runs, which lists do not read unless a column shows a setting."""
    return dict(Run.objects.filter(pk__in=list(run_ids)).values_list("pk", "spec"))


def spec_yaml(run: Run, *, only_set: bool = False) -> str:
    """The spec in the schema's order, which the database does not keep; `only_set` leaves out defaults."""
    try:
        return dump_yaml(load_spec(run.spec).model_dump(mode="json", exclude_defaults=only_set))
    except SpecError:
        # Submitted before validation became stricter: shown as stored.
        return dump_yaml(run.spec)


def provenances(run: Run) -> list[tuple[int, Any]]:
    """(epoch, `oppo_contract.events.Provenance` as plain data) of its newest attempts that reported it, newest first."""
    rows = Attempt.objects.filter(run=run, provenance__isnull=False).order_by("-epoch")
    return list(rows.values_list("epoch", "provenance")[:MOST_PROVENANCES])
