"""Every operation of `/api/v1`: one request that works, by operation id, and who may make it. A new operation needs a row."""

from tests.web.conftest import tiny_spec
from tests.web.matrix.rows import MAINTAINER, MEMBER, OWNER, Row, delete, get, post

SPEC = {"spec": tiny_spec(steps=20)}
VIEW = {"name": "best", "query": {"q": "state:running", "sort": "-reward"}}
CHARTS = {"charts": [{"keys": ["actor/entropy"], "log": True}]}
HOOK = {"url": "https://example.org/hook", "conditions": ["failed"]}
CHANGED_HOOK = {"on": False, "conditions": ["failed", "finished"]}
TOKEN = {"name": "nightly", "scope": "submit", "days": 30, "service": True}

# What steers a run takes a maintainer, or the member whose it is; these are ada's, and {held} is ben's.
OPERATIONS: dict[str, Row] = {
    "validate_spec": post("runs/validate", SPEC, only_reads=True),
    "submit_run": post("runs", SPEC | {"project": "demo"}, MEMBER, status=201),
    "list_runs": get("runs?filter=state:running&sort=-reward&limit=2"),
    "show_run": get("runs/{run}"),
    "download_spec": get("runs/{run}/spec.yaml"),
    "download_snippet": get("runs/{run}/spec.py"),
    "tag_run": post("runs/{run}/tags", {"add": ["baseline"], "remove": []}, MEMBER),
    "pin_run": post("runs/{run}/pin", least=MEMBER),
    "list_pinned_runs": get("runs/pinned"),
    "unpin_run": post("runs/{run}/unpin", least=MEMBER),
    "list_filter_words": get("runs/words"),
    "show_metrics": get("runs/{run}/metrics?keys=critic/score/mean&x=step&max_points=100"),
    "download_metrics": get("runs/{run}/metrics.ndjson?keys=critic/*"),
    "show_provenance": get("runs/{run}/provenance"),
    "show_usage": get("runs/{run}/usage"),
    "show_saving": get("runs/{run}/saving"),
    "list_decisions": get("runs/{run}/decisions"),
    "compare_runs": get("compare?runs={run},{waiting}&keys=critic/score/mean&target=1.2"),
    "list_samples": get("runs/{run}/samples?sort=-score&limit=1"),
    "show_sample": get("runs/{run}/samples/{sample}"),
    "show_timeline": get("runs/{run}/timeline?from_step=1&to_step=1"),
    "show_timeline_figure": get("runs/{run}/timeline/figure?from_step=1&to_step=1"),
    "download_trace": get("runs/{run}/trace.json?from_step=1&to_step=1"),
    "show_logs": get("runs/{run}/logs?limit=2"),
    "download_logs": get("runs/{run}/logs.txt"),
    "list_checkpoints": get("runs/{run}/checkpoints"),
    "download_checkpoint": get("runs/{run}/checkpoints/{checkpoint}/download", MEMBER),
    "list_events": get("runs/{run}/events?limit=3"),
    "fork_run": post("runs/{run}/fork", {"changes": {"seed": 2}, "name": "second seed"}, MEMBER, status=201),
    "fork_checkpoint": post(
        "runs/{run}/checkpoints/{checkpoint}/fork", {"changes": {"ppo.learning_rate": 1e-6}}, MEMBER, status=201
    ),
    "set_priority": post("runs/{waiting}/priority", {"priority": 60}, MAINTAINER),
    "extend_run": post("runs/{limited}/extend", {"hours": 2}, MAINTAINER),
    "pause_run": post("runs/{waiting}/pause", least=MAINTAINER),
    "resume_run": post("runs/{paused}/resume", least=MAINTAINER),
    "retry_failed_run": post("runs/{failed}/retry", least=MAINTAINER),
    "resume_run_at": post("runs/{paused}/checkpoints/{its_checkpoint}/resume", least=MAINTAINER),
    "silence_run": post("runs/{run}/silence", {"silent": False}, MAINTAINER),
    "list_alerts": get("alerts?open=true&limit=1"),
    "count_unread_alerts": get("alerts/unread"),
    "acknowledge_alert": post("alerts/{alert}/acknowledge", least=MEMBER),
    "mark_alerts_seen": post("alerts/seen", {"up_to": 1}),
    "show_storage": get("runs/{run}/storage"),
    "list_storage": get("storage"),
    "cancel_run": post("runs/{waiting}/cancel", least=MAINTAINER),
    "archive_run": post("runs/{ended}/archive", least=MAINTAINER),
    "unarchive_run": post("runs/{ended}/unarchive", least=MAINTAINER),
    "delete_run": delete("runs/{ended}", MAINTAINER),
    "list_trash": get("trash"),
    "restore_run": post("runs/{deleted}/restore", least=MAINTAINER),
    "purge_run": post("runs/{deleted}/purge", least=MAINTAINER, status=204),
    "save_view": post("views", VIEW, status=201),
    "list_views": get("views"),
    "change_view": post("views/{view}", {"name": "the best"}, MAINTAINER),
    "set_default_view": post("views/default", {"view": None}),
    "delete_view": post("views/{view}/delete", least=MAINTAINER),
    "restore_view": post("views/{gone_view}/restore", least=MAINTAINER),
    "show_charts": get("projects/{project}/charts"),
    "save_charts": post("projects/{project}/charts", CHARTS),
    "share_charts": post("projects/{project}/charts/share", CHARTS, MEMBER),
    "reset_charts": post("projects/{project}/charts/reset"),
    "show_queue": get("queue"),
    "show_cluster": get("cluster"),
    "list_quotas": get("quotas"),
    "stream": get("stream?runs={run}"),
    "list_teams": get("teams"),
    "show_team": get("teams/{team}"),
    "list_members": get("teams/{team}/members"),
    "create_project": post("teams/{team}/projects", {"name": "poems"}, MEMBER, status=201),
    "list_audit_entries": get("teams/{team}/audit?action=run.submit", OWNER),
    "add_webhook": post("teams/{team}/webhooks", HOOK, OWNER, admin=True, status=201),
    "list_webhooks": get("teams/{team}/webhooks", OWNER),
    "change_webhook": post("teams/{team}/webhooks/{webhook}", CHANGED_HOOK, OWNER, admin=True),
    "delete_webhook": delete("teams/{team}/webhooks/{webhook}", OWNER, admin=True, status=204),
    "who_am_i": get("me"),
    "list_tokens": get("tokens"),
    "create_token": post("tokens", TOKEN, OWNER, admin=True, status=201),
    "revoke_token": delete("tokens/{token}", OWNER, admin=True, hidden=True, status=204),
}
# The same operations about things that their query names, or that they make; and what the description leaves out.
OWN_RUN = [post(f"runs/{{held}}/{deed}") for deed in ("resume", "checkpoints/{held_at}/resume", "cancel")]
FURTHER: list[Row] = [
    get("openapi.json"),
    get("runs?project={project}"),
    get("runs/pinned?project={project}"),
    get("alerts?team={team}"),
    get("alerts?run={run}"),
    get("tokens?team={team}"),
    post("runs", {**SPEC, "project": "{project}"}, MEMBER, status=201),
    post("views", {**VIEW, "team": "{team}"}, MEMBER, status=201),
    post("tokens", {"name": "mine", "team": "{team}", "scope": "read"}, admin=True, status=201),
    post("views/default", {"view": "{view}"}),
]
