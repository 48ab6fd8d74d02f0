"""The pages that show many runs, and the submit page.

A request with `?part=…` returns the changing part of a page only; `static/js/core/live-fragment.js` and htmx insert it.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET

from oppo_contract.presets import PRESETS
from oppo_contract.states import ENDED, HOLDING_DEVICES, RunState
from oppo_contract.wire import CatalogueEntry
from oppo_platform.accounts.access import visible_teams
from oppo_platform.accounts.current_team import current_team
from oppo_platform.cursors import BadCursor
from oppo_platform.pages import spec_form
from oppo_platform.pages.cluster_map import group_by_pool
from oppo_platform.pages.first_run import checklist, first_run_context
from oppo_platform.pages.page_context import live_catalogue, with_curves
from oppo_platform.pages.runs_table import heads, query, rows
from oppo_platform.pages.spec_form import ExampleRun
from oppo_platform.projects.access import submit_projects, visible_projects
from oppo_platform.projects.models import Project
from oppo_platform.runs.access import visible_runs
from oppo_platform.runs.columns import DEFAULT_COLUMNS, Column, format_columns, parse_columns, reads_settings
from oppo_platform.runs.filtering import FilterError
from oppo_platform.runs.forks import fork_spec
from oppo_platform.runs.models import PRIORITIES, Run
from oppo_platform.runs.pins import pinned_runs
from oppo_platform.runs.saved_views import default_view, menu_views, view_query
from oppo_platform.runs.selectors import RunList, existing_runs, get_run, list_runs, load_specs, run_summary, run_url
from oppo_platform.scheduling.nodes_overview import nodes_overview
from oppo_platform.scheduling.selectors import Waiting, queue_order, waiting_runs

RUNS_A_PAGE = 50
COMPARABLE_RUNS = 200
QUEUE_ROWS = 100
PRIORITY_STEP = 10
STATE_GROUPS: dict[str, tuple[str, frozenset[RunState]]] = {
    "": ("All", frozenset()),
    "active": ("Running", HOLDING_DEVICES),
    "waiting": ("Waiting", frozenset({RunState.QUEUED, RunState.PAUSED})),
    "failed": ("Failed", frozenset({RunState.FAILED})),
    "ended": ("Ended", ENDED),
}


@require_GET
def runs(request: HttpRequest) -> HttpResponse:
    """Runs of the user's teams: `show` selects states, `project` a project, `q` filters, `sort` sorts, `cols` selects columns."""
    if request.GET.get("part") == "first-run":
        return _first_run(request)
    group, project = request.GET.get("show", ""), _number(request, "project")
    where, sort, cursor, cols = (request.GET.get(name, "") for name in ("q", "sort", "cursor", "cols"))
    if group not in STATE_GROUPS:
        raise Http404
    team_id = None if project else _team_id(request)  # a link to a project works for any current team
    default = None if request.GET.get("part") else default_view(request.user)
    if default is not None and not request.GET:
        return redirect(f"{reverse('pages:runs')}?{query({**view_query(default), 'view': default.pk})}")
    columns, wrong_columns = _columns(cols)
    listed, result, wrong = _listed(request, columns, project, team_id)
    wrong = wrong_columns or wrong
    if request.GET.get("part"):
        # Not an HTTP error: browsers would log any other status while the user types a filter.
        return HttpResponse(wrong, content_type="text/plain") if wrong else render(request, "runs/rows.html", {"runs": listed})
    has_runs = bool(listed) or visible_runs(request.user).exists()
    view = request.GET.get("view", "") or ("all" if default is not None else "")
    params = {"show": group, "project": project, "q": where, "sort": sort, "cols": format_columns(columns), "view": view}
    context: dict[str, Any] = {
        "runs": listed,
        "wrong": wrong,
        "columns": columns,
        "section": "runs",
        "projects": _of_team(visible_projects(request.user), team_id),
        "teams": visible_teams(request.user),
        "none_match": not result["items"] and not wrong,
        "has_runs": has_runs,
        "may_submit": submit_projects(request.user).exists(),
        "next": result["next"],
        "older_query": query({**params, "cursor": result["next"]}),
        "rows_url": f"{reverse('pages:runs')}?{query({**params, 'cursor': cursor, 'part': 'rows'})}",
    }
    first_run = {} if has_runs or not context["projects"] else first_run_context(request)
    return render(request, "runs/list.html", context | _choices(request, params, columns) | first_run)


def _first_run(request: HttpRequest) -> HttpResponse:
    """The checklist of the empty list; the page is loaded again once there is a run, or no project for one."""
    if visible_runs(request.user).exists() or not visible_projects(request.user).exists():
        return HttpResponse(headers={"HX-Refresh": "true"})
    return render(request, "runs/first_run.html", first_run_context(request))


def _choices(request: HttpRequest, params: dict[str, Any], columns: list[Column]) -> dict[str, Any]:
    """The current choices for the page's controls, and their alternatives."""
    saved = menu_views(request.user)
    return {
        "where": params["q"],
        "sort": params["sort"],
        "cols": params["cols"],
        "group": params["show"],
        "project": params["project"],
        "view": params["view"],
        "view_name": next((item["name"] for item in saved if str(item["id"]) == params["view"]), ""),
        "usual": ",".join(DEFAULT_COLUMNS),
        "saved": [{**item, "address": query({**item["query"], "view": item["id"]})} for item in saved],
        "heads": heads(columns, params),
        "views": _state_tabs(params),
    }


def _columns(cols: str) -> tuple[list[Column], str]:
    """The chosen columns, or the default ones and what is wrong with the choice."""
    try:
        return parse_columns(cols), ""
    except FilterError as error:
        return parse_columns(""), error.message


def _listed(
    request: HttpRequest, columns: list[Column], project: int | None, team_id: int | None
) -> tuple[list[dict[str, Any]], RunList, str]:
    """Rows of the requested page, below the pinned ones; or none, and what is wrong with the filter."""
    where, sort, cursor, group = (request.GET.get(name, "") for name in ("q", "sort", "cursor", "show"))
    pinned = pinned_runs(request.user, project, team_id)
    try:
        result = list_runs(
            request.user, states=STATE_GROUPS[group][1], project=project, team_id=team_id, where=where, sort=sort,
            limit=RUNS_A_PAGE, cursor=cursor, without=pinned,
        )  # fmt: skip
    except BadCursor:
        raise Http404 from None
    except FilterError as error:
        return [], RunList(items=[], next=None), error.message
    on_top = [run_summary(run) for run in existing_runs(request.user, pinned)]
    shown = with_curves([*on_top, *result["items"]])
    specs = load_specs(run["id"] for run in shown) if reads_settings(columns) else {}
    return rows(columns, shown, specs, pinned), result, ""


def _team_id(request: HttpRequest) -> int | None:
    chosen = current_team(request)
    return chosen.pk if chosen else None


def _of_team(projects: QuerySet[Project], team_id: int | None) -> QuerySet[Project]:
    return projects.filter(team_id=team_id) if team_id is not None else projects


def _state_tabs(params: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"title": title, "query": query({**params, "show": group}), "current": group == params["show"]}
        for group, (title, _) in STATE_GROUPS.items()
    ]


@require_GET
def queue(request: HttpRequest) -> HttpResponse:
    """Waiting runs with their reasons (`?first=N` of the user's), runs that hold devices, and the cluster."""
    nodes = nodes_overview(request.user)
    first = _number(request, "first") or QUEUE_ROWS
    standing = queue_order(request.user)
    waiting = waiting_runs(standing, standing.ids[:first])
    context = {
        "section": "queue",
        "queue": waiting | {"items": [_steps(item) for item in waiting["items"]]},
        "mine": len(standing.ids),
        "first": first,
        "more": first + QUEUE_ROWS if len(standing.ids) > first else None,
        "active": list_runs(request.user, states=HOLDING_DEVICES, limit=COMPARABLE_RUNS)["items"],
        "pools": group_by_pool(nodes),
        "any_free": _free_devices(nodes) > 0,
    }
    return render(request, "parts/queue.html" if request.GET.get("part") else "queue.html", context)


def _steps(item: Waiting) -> dict[str, Any]:
    """A waiting run with the priorities that its two buttons set."""
    lowest, highest = PRIORITIES
    priority = item["priority"]
    return {**item, "raised": min(highest, priority + PRIORITY_STEP), "lowered": max(lowest, priority - PRIORITY_STEP)}


def _free_devices(nodes: list[dict[str, Any]]) -> int:
    return sum(d["run"] is None and d["state"] == "ready" for node in nodes if node["live"] for d in node["devices"])


@require_GET
def submit(request: HttpRequest) -> HttpResponse:
    """The form for a new run; `?from=ID` starts it from another run's spec, `step` also from its checkpoint of that step.

    `?preset=KEY` starts it from an example. `?part=examples` returns what the examples need, and the catalogue.
    """
    fork, step = _forked(request), _number(request, "step")
    catalogue = live_catalogue()
    examples = spec_form.example_runs(catalogue)
    if request.GET.get("part"):
        return render(request, "parts/examples.html", {"examples": examples, "catalogue": _as_data(catalogue)})
    nodes = [node for node in nodes_overview(request.user) if node["live"]]
    # Of the current team; of all teams for a fork, for a link with a project, and if the current team has no project.
    everywhere = submit_projects(request.user)
    named = fork is not None or bool(request.GET.get("project"))
    projects = everywhere if named else _of_team(everywhere, _team_id(request)) or everywhere
    examples = [] if fork else examples  # a fork's models and prompts are those of its run
    page_data: dict[str, Any] = {
        "spec": fork_spec(fork.spec, fork.pk, step) if fork else _starting_spec(request, catalogue, examples),
        "catalogue": _as_data(catalogue),
        "presets": [{"key": p.key, "overlap": p.overlap, "settings": p.settings} for p in PRESETS],
        "examples": [{"key": e.preset.key, "overlap": e.preset.overlap, "spec": e.spec} for e in examples],
        "fork": fork.pk if fork else None,
    }
    context = {
        "section": "submit",
        "projects": projects,
        "project": fork.project_id if fork else _number(request, "project"),
        "fork": {"name": fork.name, "url": run_url(fork.pk), "id": fork.pk, "step": step} if fork else None,
        "groups": spec_form.GROUPS,
        "presets": [*PRESETS, *(example.preset for example in examples)],
        "examples": examples,
        "lacking": any(not example.ready for example in examples),
        "connected": bool(nodes),
        "missing": [item.title for item in checklist(nodes, spec_form.offer(catalogue), "", "") if not item.there],
        "first_run": not visible_runs(request.user).exists(),
        "page_data": page_data,
        "free": _free_devices(nodes),
        "device_count": sum(len(node["devices"]) for node in nodes),
    }
    return render(request, "submit.html", context)


def _as_data(catalogue: list[CatalogueEntry]) -> list[dict[str, Any]]:
    return [entry.model_dump(mode="json") for entry in catalogue]


def _starting_spec(request: HttpRequest, catalogue: list[CatalogueEntry], examples: list[ExampleRun]) -> dict[str, Any]:
    key = request.GET.get("preset", "")
    if not key:
        return spec_form.starting_spec(catalogue)
    if (named := next((example for example in examples if example.preset.key == key), None)) is None:
        raise Http404
    return named.spec


def _forked(request: HttpRequest) -> Run | None:
    run_id = _number(request, "from")
    if run_id is None:
        return None
    try:
        return get_run(request.user, run_id)
    except Run.DoesNotExist:
        raise Http404 from None


@require_GET
def compare(request: HttpRequest) -> HttpResponse:
    """Compare runs; the page's script reads `?runs=` from the address."""
    return render(request, "compare.html", _compare_context(request))


@require_GET
def compare_samples(request: HttpRequest) -> HttpResponse:
    """Samples of several runs side by side; the page's script reads `?runs=` from the address, too."""
    return render(request, "compare/samples.html", _compare_context(request))


def _compare_context(request: HttpRequest) -> dict[str, Any]:
    choices = list_runs(request.user, team_id=_team_id(request), limit=COMPARABLE_RUNS)["items"]
    return {"section": "compare", "choices": choices}


def _number(request: HttpRequest, name: str) -> int | None:
    text = request.GET.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise Http404
    return int(text)
