"""Addresses of the pages. A run's own address is `runs.selectors.run_url`."""

from django.urls import path
from django.views.generic import RedirectView

from oppo_platform.pages import run_views, sharing_views, team_views, views

app_name = "pages"
urlpatterns = [
    path("", RedirectView.as_view(pattern_name="pages:runs"), name="home"),
    path("runs", views.runs, name="runs"),
    path("runs/new", views.submit, name="submit"),
    path("runs/<int:run_id>", run_views.training, name="run"),
    path("runs/<int:run_id>/timeline", run_views.timeline, name="run-timeline"),
    path("runs/<int:run_id>/logs", run_views.logs, name="run-logs"),
    path("runs/<int:run_id>/config", run_views.config, name="run-config"),
    path("runs/<int:run_id>/events", run_views.events, name="run-events"),
    path("queue", views.queue, name="queue"),
    path("sharing", sharing_views.sharing, name="sharing"),
    path("sharing/pools/<int:pool_id>", sharing_views.rename_pool, name="rename-pool"),
    path("sharing/pools/<int:pool_id>/teams/<int:team_id>", sharing_views.set_quota, name="set-quota"),
    path("sharing/nodes/<int:node_id>/<slug:deed>", sharing_views.steer_node, name="steer-node"),
    path("compare", views.compare, name="compare"),
    path("teams", team_views.teams, name="teams"),
    path("teams/<int:team_id>/projects", team_views.create_project, name="create-project"),
    path("teams/<int:team_id>/members", team_views.set_member, name="set-member"),
]
