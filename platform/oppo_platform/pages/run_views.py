"""The pages of one run: a common header, and a tab each."""

from __future__ import annotations

from typing import Any, get_args

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_GET
from pydantic import ValidationError

from oppo_contract.events import IdleCause
from oppo_contract.sections.run import Resources
from oppo_contract.states import RunState
from oppo_platform.accounts.access import Action, may
from oppo_platform.alerts.policy import Condition
from oppo_platform.alerts.rules import team_rules
from oppo_platform.pages.markdown import render_markdown
from oppo_platform.pages.plan_table import plan_table
from oppo_platform.projects.access import may_submit
from oppo_platform.projects.chart_layouts import chart_layout
from oppo_platform.runs.access import may_manage
from oppo_platform.runs.checkpoints import describe_checkpoints
from oppo_platform.runs.models import Run
from oppo_platform.runs.selectors import get_run, provenances, run_summary, spec_yaml
from oppo_platform.storage.selectors import taken_by

TABS = (
    ("run", "Training"),
    ("run-timeline", "Timeline"),
    ("run-utilization", "System"),
    ("run-samples", "Samples"),
    ("run-logs", "Logs"),
    ("run-config", "Config"),
    ("run-checkpoints", "Checkpoints"),
    ("run-events", "Events"),
)
# Data that retention deletes before the run itself (`storage.retention`).
OF_DETAIL = ("run-timeline", "run-samples", "run-logs")
CHECKOUTS = (("engine", "Engine commit"), ("user", "Your code's commit"))
# Legend of the timeline's colours; keys are the design's tokens.
PHASES = (
    ("decode", "decode"),
    ("actor-forward", "actor forward"),
    ("reward-prefill", "reward"),
    ("reference-prefill", "reference"),
    ("critic-prefill", "critic"),
    ("update-actor", "update actor"),
    ("update-critic", "update critic"),
    ("checkpoint", "checkpoint"),
    ("weight-sync", "other"),
)


@require_GET
def training(request: HttpRequest, run_id: int) -> HttpResponse:
    """Curves, controllers and samples."""
    run = _run(request, run_id)
    rules = team_rules(run.project.team_id)
    limits: dict[str, Any] = {
        str(name): rules[name].threshold if rules[name].on else None for name in (Condition.KL_ABOVE, Condition.BUBBLE_ABOVE)
    }
    more = {"layout": chart_layout(request.user, run.project), "plan": plan_table(run)}
    return _page(request, run, "run", "run/training.html", limits | more)


@require_GET
def timeline(request: HttpRequest, run_id: int) -> HttpResponse:
    """Spans of every device, and causes of idle time."""
    context = {"phases": PHASES, "causes": get_args(IdleCause)}
    return _page(request, _run(request, run_id), "run-timeline", "run/timeline.html", context)


@require_GET
def utilization(request: HttpRequest, run_id: int) -> HttpResponse:
    """Utilization of each device, and its idle time by cause."""
    return _page(request, _run(request, run_id), "run-utilization", "run/utilization.html")


@require_GET
def samples(request: HttpRequest, run_id: int) -> HttpResponse:
    """Recorded answers: filter, sort, search, and the same prompt over the steps."""
    return _page(request, _run(request, run_id), "run-samples", "run/samples.html")


@require_GET
def samples_side_by_side(request: HttpRequest, run_id: int) -> HttpResponse:
    """Recorded answers to the same prompt, a column for each step."""
    return _page(request, _run(request, run_id), "run-samples", "run/side_by_side.html")


@require_GET
def logs(request: HttpRequest, run_id: int) -> HttpResponse:
    """Output of the engine and its supervisor."""
    return _page(request, _run(request, run_id), "run-logs", "run/logs.html")


@require_GET
def config(request: HttpRequest, run_id: int) -> HttpResponse:
    """The spec as YAML, and what the newest attempt was made of; `?only=set` leaves out defaults."""
    run, only_set = _run(request, run_id), request.GET.get("only") == "set"
    attempt, made_of = next(iter(provenances(run)), (0, None))
    command = made_of["command"].replace("SPEC.yaml", f"run-{run.pk}.yaml", 1) if made_of else ""
    context = {
        "yaml": spec_yaml(run, only_set=only_set),
        "only_set": only_set,
        "attempt": attempt,
        "provenance": made_of,
        "commits": [(title, made_of[key]) for key, title in CHECKOUTS if made_of and made_of[key]],
        "command": command,
    }
    return _page(request, run, "run-config", "run/config.html", context)


@require_GET
def events(request: HttpRequest, run_id: int) -> HttpResponse:
    """Events of the run in one list."""
    return _page(request, _run(request, run_id), "run-events", "run/events.html")


@require_GET
def checkpoints(request: HttpRequest, run_id: int) -> HttpResponse:
    """Checkpoints, and the one from which the next attempt resumes."""
    run = _run(request, run_id)
    context = {
        "checkpoints": describe_checkpoints(run),
        "run_id": run.pk,
        "may_fork": may_submit(request.user, run.project),
        "may_resume": run.state == RunState.PAUSED and may_manage(request.user, run),
        "may_download": may(request.user, Action.DOWNLOAD, run.project.team_id),
    }
    if request.GET.get("part"):
        return render(request, "run/checkpoint_rows.html", context)
    return _page(request, run, "run-checkpoints", "run/checkpoints.html", context)


def _run(request: HttpRequest, run_id: int) -> Run:
    try:
        return get_run(request.user, run_id)
    except Run.DoesNotExist:
        raise Http404 from None


def _ranks(run: Run) -> int:
    """Processes that train the run; 1 for a spec from before stricter validation that has none."""
    try:
        return Resources.model_validate(run.spec.get("resources", {})).ranks
    except ValidationError:
        return 1


def _page(request: HttpRequest, run: Run, tab: str, template: str, more: dict[str, Any] | None = None) -> HttpResponse:
    taken = taken_by(run)
    context = {
        "section": "runs",
        "run": run_summary(run),
        "spec": run.spec,
        "ranks": _ranks(run),
        "may_manage": may_manage(request.user, run),
        "notes": run.notes,
        "notes_html": render_markdown(run.notes),
        "taken": taken,
        "team_id": run.project.team_id,
        "trash_days": f"{settings.OPPO_TRASH_DAYS:g}",
        "may_submit": may_submit(request.user, run.project),
        "tabs": [
            {
                "title": title,
                "url": reverse(f"pages:{name}", args=[run.pk]),
                "current": name == tab,
                "count": run.checkpoints.count() if name == "run-checkpoints" else None,
            }
            for name, title in TABS
        ],
    }
    gone = tab in OF_DETAIL and taken["detail_deleted_at"] is not None
    return render(request, "run/detail_gone.html" if gone else template, context | (more or {}))
