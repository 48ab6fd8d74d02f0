"""Pinned charts of a project's runs over HTTP (docs/interfaces.md)."""

from __future__ import annotations

from typing import Annotated

from django.http import HttpRequest
from ninja import Path, Router, Schema
from pydantic import ConfigDict, Field, StringConstraints

from oppo_contract.events import MetricKey
from oppo_platform.api.lookups import caller, chosen_project
from oppo_platform.projects import chart_layouts as service
from oppo_platform.projects.chart_layouts import Layout

MOST_CHARTS, MOST_KEYS = 60, 12

router = Router()
ProjectId = Annotated[int, Path(description="The project's number.")]
Text = Annotated[str, StringConstraints(strip_whitespace=True, pattern=r"^[^\x00]*$")]


class ChartBody(Schema):
    """A chart of one metric, or of several in one panel."""

    model_config = ConfigDict(extra="forbid")

    keys: list[MetricKey] = Field(
        min_length=1, max_length=MOST_KEYS, description="Names of metrics (docs/metrics.md), a curve each."
    )
    title: Text = Field("", max_length=80, description="Empty: the metrics' names.")
    log: bool = Field(False, description="Whether the y axis is logarithmic.")


class LayoutBody(Schema):
    """All pinned charts, in order."""

    model_config = ConfigDict(extra="forbid")

    charts: list[ChartBody] = Field(max_length=MOST_CHARTS, description="The pinned charts, in order.")

    def plain(self) -> list[service.Chart]:
        """The charts as they are stored; a metric counts once in a chart."""
        return [service.Chart(title=c.title, keys=list(dict.fromkeys(c.keys)), log=c.log) for c in self.charts]


@router.get("projects/{int:project_id}/charts", summary="Pinned charts of a project's runs")
def show_charts(request: HttpRequest, project_id: ProjectId) -> Layout:
    """Your own, or else the project's."""
    user = caller(request)
    return service.chart_layout(user, chosen_project(user, project_id))


@router.post("projects/{int:project_id}/charts", summary="Pin charts for yourself")
def save_charts(request: HttpRequest, project_id: ProjectId, body: LayoutBody) -> Layout:
    """Replaces your pinned charts in this project."""
    user = caller(request)
    return service.save_charts(user, chosen_project(user, project_id), body.plain())


@router.post("projects/{int:project_id}/charts/share", summary="Pin charts for everyone in a project")
def share_charts(request: HttpRequest, project_id: ProjectId, body: LayoutBody) -> Layout:
    """Replaces the project's charts, and drops your own. Those who have their own keep them. Requires permission to submit."""
    user = caller(request)
    return service.share_charts(user, chosen_project(user, project_id), body.plain())


@router.post("projects/{int:project_id}/charts/reset", summary="Use the project's pinned charts")
def reset_charts(request: HttpRequest, project_id: ProjectId) -> Layout:
    """Drops your own. Idempotent."""
    user = caller(request)
    return service.reset_charts(user, chosen_project(user, project_id))
