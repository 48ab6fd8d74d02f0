"""Addresses of the pages. A run's own address is `runs.selectors.run_url`."""

from django.urls import path
from django.views.generic import RedirectView

from oppo_platform.pages import audit_views, link_views, run_views, secret_views, sharing_views, team_views, views

app_name = "pages"
urlpatterns = [
    path("", RedirectView.as_view(pattern_name="pages:runs"), name="home"),
    path("runs", views.runs, name="runs"),
    path("runs/new", views.submit, name="submit"),
    path("runs/<int:run_id>", run_views.training, name="run"),
    path("runs/<int:run_id>/timeline", run_views.timeline, name="run-timeline"),
    path("runs/<int:run_id>/utilization", run_views.utilization, name="run-utilization"),
    path("runs/<int:run_id>/samples", run_views.samples, name="run-samples"),
    path("runs/<int:run_id>/logs", run_views.logs, name="run-logs"),
    path("runs/<int:run_id>/config", run_views.config, name="run-config"),
    path("runs/<int:run_id>/checkpoints", run_views.checkpoints, name="run-checkpoints"),
    path("runs/<int:run_id>/events", run_views.events, name="run-events"),
    path("queue", views.queue, name="queue"),
    path("sharing", sharing_views.sharing, name="sharing"),
    path("sharing/audit", audit_views.cluster_log, name="cluster-audit"),
    path("sharing/pools/<int:pool_id>", sharing_views.rename_pool, name="rename-pool"),
    path("sharing/pools/<int:pool_id>/teams/<int:team_id>", sharing_views.set_quota, name="set-quota"),
    path("sharing/nodes/<int:node_id>/<slug:deed>", sharing_views.steer_node, name="steer-node"),
    path("sharing/devices/<int:device_id>/put-back", sharing_views.put_back, name="put-back"),
    path("compare", views.compare, name="compare"),
    path("teams", team_views.teams, name="teams"),
    path("teams/current", team_views.choose, name="choose-team"),
    path("teams/<int:team_id>", team_views.team, name="team"),
    path("teams/<int:team_id>/projects", team_views.create_project, name="create-project"),
    path("teams/<int:team_id>/members", team_views.set_member, name="set-member"),
    path("teams/<int:team_id>/leave", team_views.leave, name="leave-team"),
    path("teams/<int:team_id>/members/<int:user_id>/remove", team_views.remove_member, name="remove-member"),
    path("teams/<int:team_id>/members/<int:user_id>/password-link", link_views.create_password_link, name="create-password-link"),
    path(
        "teams/<int:team_id>/members/<int:user_id>/password-link/revoke",
        link_views.revoke_password_link,
        name="revoke-password-link",
    ),
    path("teams/<int:team_id>/invites", link_views.create_invite, name="create-invite"),
    path("teams/<int:team_id>/invites/<int:invite_id>/revoke", link_views.revoke_invite, name="revoke-invite"),
    path("teams/<int:team_id>/audit", audit_views.audit_log, name="team-audit"),
    path("teams/<int:team_id>/secrets", secret_views.secrets, name="team-secrets"),
    path("teams/<int:team_id>/secrets/set", secret_views.set_secret, name="set-secret"),
    path("teams/<int:team_id>/secrets/<str:name>/delete", secret_views.delete_secret, name="delete-secret"),
    path("invites/<str:token>", link_views.invite, name="invite"),
    path("password-links/<str:token>", link_views.password_link, name="password-link"),
]
