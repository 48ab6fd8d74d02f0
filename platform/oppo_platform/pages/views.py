"""The pages that show many runs, and the one that makes a new one.

A request with `?part=…` asks for the moving part of a page only; `static/js/partial.js` puts it in place.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET

from oppo_contract.presets import PRESETS
from oppo_contract.states import ENDED, HOLDING_DEVICES, RunState
from oppo_platform.accounts.access import submit_projects, visible_projects, visible_runs, visible_teams
from oppo_platform.accounts.current import current_team
from oppo_platform.cluster.selectors import nodes_overview
from oppo_platform.cursors import BadCursor
from oppo_platform.pages import spec_form
from oppo_platform.pages.cluster_map import pools_of
from oppo_platform.pages.selectors import live_catalogue, with_curves
from oppo_platform.runs.filtering import FilterError
from oppo_platform.runs.models import PRIORITIES, Project, Run
from oppo_platform.runs.selectors import RunList, get_run, list_runs, run_url
from oppo_platform.scheduling.selectors import Waiting
from oppo_platform.scheduling.selectors import queue as waiting_runs

RUNS_A_PAGE = 50
COMPARABLE_RUNS = 200
PRIORITY_STEP = 10
# Title, what it is sorted by, and `-` where the greatest are looked for first.
COLUMNS = (
    ("Name", "name", ""), ("State", "state", ""), ("Step", "step", "-"), ("Reward", "reward", "-"), ("Curve", "", ""),
    ("KL", "kl", ""), ("Bubble", "bubble", ""), ("Time", "elapsed", "-"), ("Preset", "", ""), ("Project", "project", ""),
    ("Owner", "user", ""), ("Submitted", "submitted", "-"),
)  # fmt: skip
STATE_GROUPS: dict[str, tuple[str, frozenset[RunState]]] = {
    "": ("All", frozenset()),
    "active": ("Running", HOLDING_DEVICES),
    "waiting": ("Waiting", frozenset({RunState.QUEUED, RunState.PAUSED})),
    "failed": ("Failed", frozenset({RunState.FAILED})),
    "ended": ("Ended", ENDED),
}


@require_GET
def runs(request: HttpRequest) -> HttpResponse:
    """The runs of the user's teams: `show` picks states, `project` a project, `q` filters, `sort` sorts, `after` pages."""
    group, project = request.GET.get("show", ""), _number(request, "project")
    where, sort, after = (request.GET.get(name, "") for name in ("q", "sort", "after"))
    title_states = STATE_GROUPS.get(group)
    if title_states is None:
        raise Http404
    team_id = None if project else _team_id(request)  # a link to a project leads there, whatever team one looks at
    found, wrong = _listed(request, title_states[1], project, team_id)
    context: dict[str, Any] = {"runs": with_curves(found["items"])}
    if request.GET.get("part"):
        # Not an error of the page, which shows what is wrong while one types: browsers would report any other status.
        return HttpResponse(wrong, content_type="text/plain") if wrong else render(request, "runs/rows.html", context)
    kept = {"show": group, "project": project, "q": where, "sort": sort}
    context |= {
        "where": where,
        "wrong": wrong,
        "sort": sort,
        "columns": _columns(kept),
        "section": "runs",
        "group": group,
        "project": project,
        "projects": _of_team(visible_projects(request.user), team_id),
        "teams": visible_teams(request.user),
        "views": _state_tabs(kept),
        "has_runs": bool(found["items"]) or visible_runs(request.user).exists(),
        "may_submit": submit_projects(request.user).exists(),
        "next": found["next"],
        "older_query": _query({**kept, "after": found["next"]}),
        "rows_url": f"{reverse('pages:runs')}?{_query({**kept, 'after': after, 'part': 'rows'})}",
    }
    return render(request, "runs/list.html", context)


def _listed(request: HttpRequest, states: frozenset[RunState], project: int | None, team_id: int | None) -> tuple[RunList, str]:
    """The page of runs that is asked for, or none and what is wrong with the filter."""
    where, sort, after = (request.GET.get(name, "") for name in ("q", "sort", "after"))
    try:
        found = list_runs(
            request.user, states=states, project=project, team_id=team_id, where=where, sort=sort, limit=RUNS_A_PAGE,
            after=after or None,
        )  # fmt: skip
    except BadCursor:
        raise Http404 from None
    except FilterError as error:
        return RunList(items=[], next=None), error.message
    return found, ""


def _columns(kept: dict[str, Any]) -> list[dict[str, Any]]:
    """Heads of the table. One that sorts has the query that does so: first as people look first, then reversed."""
    heads = []
    for title, column, first in COLUMNS:
        now = kept["sort"].removeprefix("-") == column
        falls = kept["sort"].startswith("-")
        turned = ("" if falls else "-") + column if now else first + column
        order = ("descending" if falls else "ascending") if now and column else ""
        heads.append({"title": title, "order": order, "query": _query({**kept, "sort": turned}) if column else None})
    return heads


def _team_id(request: HttpRequest) -> int | None:
    chosen = current_team(request)
    return chosen.pk if chosen else None


def _of_team(projects: QuerySet[Project], team_id: int | None) -> QuerySet[Project]:
    return projects.filter(team_id=team_id) if team_id is not None else projects


def _state_tabs(kept: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"title": title, "query": _query({**kept, "show": group}), "current": group == kept["show"]}
        for group, (title, _) in STATE_GROUPS.items()
    ]


@require_GET
def queue(request: HttpRequest) -> HttpResponse:
    """Waiting runs with their reasons, runs that hold devices, and the cluster."""
    nodes = nodes_overview(request.user)
    waiting = waiting_runs(request.user)
    context = {
        "section": "queue",
        "queue": waiting | {"items": [_steps(item) for item in waiting["items"]]},
        "active": list_runs(request.user, states=HOLDING_DEVICES, limit=COMPARABLE_RUNS)["items"],
        "pools": pools_of(nodes),
        "any_free": _free_devices(nodes) > 0,
    }
    return render(request, "parts/queue.html" if request.GET.get("part") else "queue.html", context)


def _steps(item: Waiting) -> dict[str, Any]:
    """A waiting run with the priorities that its two buttons give it."""
    lowest, highest = PRIORITIES
    priority = item["priority"]
    return {**item, "raised": min(highest, priority + PRIORITY_STEP), "lowered": max(lowest, priority - PRIORITY_STEP)}


def _free_devices(nodes: list[dict[str, Any]]) -> int:
    return sum(d["run"] is None and d["state"] == "ready" for node in nodes if node["live"] for d in node["devices"])


@require_GET
def submit(request: HttpRequest) -> HttpResponse:
    """The form for a new run; `?from=ID` starts it from another run's spec."""
    fork = _forked(request)
    catalogue = live_catalogue()
    nodes = [node for node in nodes_overview(request.user) if node["live"]]
    # The chosen team's; all of them for a fork or a link that names a project, and when none of the team's will do.
    everywhere = submit_projects(request.user)
    named = fork is not None or bool(request.GET.get("project"))
    projects = everywhere if named else _of_team(everywhere, _team_id(request)) or everywhere
    page_data = {
        "spec": spec_form.forked_spec(fork.spec) if fork else spec_form.starting_spec(catalogue),
        "catalogue": [entry.model_dump(mode="json") for entry in catalogue],
        "presets": [{"key": preset.key, "overlap": preset.overlap} for preset in PRESETS],
        "fork": fork.pk if fork else None,
    }
    context = {
        "section": "submit",
        "projects": projects,
        "project": fork.project_id if fork else _number(request, "project"),
        "fork": {"name": fork.name, "url": run_url(fork.pk)} if fork else None,
        "groups": spec_form.GROUPS,
        "presets": PRESETS,
        "catalogue": catalogue,
        "page_data": page_data,
        "free": _free_devices(nodes),
        "device_count": sum(len(node["devices"]) for node in nodes),
    }
    return render(request, "submit.html", context)


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
    """Runs side by side; which ones stands in `?runs=` and is read by the page's script."""
    choices = list_runs(request.user, team_id=_team_id(request), limit=COMPARABLE_RUNS)["items"]
    return render(request, "compare.html", {"section": "compare", "choices": choices})


def _number(request: HttpRequest, name: str) -> int | None:
    text = request.GET.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise Http404
    return int(text)


def _query(values: dict[str, Any]) -> str:
    return urlencode({name: value for name, value in values.items() if value not in (None, "")})
