"""Queries of every operation that reads: as many as the table says, however many rows there are."""

from collections import Counter

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from oppo_platform.accounts.api_tokens import create_api_token, create_service_token
from oppo_platform.alerts.lifecycle import open_alert
from oppo_platform.alerts.policy import Condition
from oppo_platform.alerts.webhooks import add_webhook
from oppo_platform.projects.models import Project
from oppo_platform.runs import lifecycle
from oppo_platform.runs.labels import change_tags
from oppo_platform.runs.models import Checkpoint, Run, Transition
from oppo_platform.runs.saved_views import save_view
from oppo_platform.telemetry.models import Decision, LogLine, SampleRow
from tests.web.matrix.operations import OPERATIONS

# With an API token, whose check is one of them. A new operation needs a row.
QUERIES = {
    "list_runs": 2, "show_run": 2, "download_spec": 2, "download_snippet": 2,
    "list_pinned_runs": 3, "list_filter_words": 8, "show_metrics": 4, "show_provenance": 3,
    "show_usage": 3, "show_saving": 5, "list_decisions": 4, "compare_runs": 6,
    "list_compared_samples": 6, "list_samples": 5, "show_sample": 6, "show_timeline": 6,
    "show_timeline_figure": 6, "download_trace": 5, "show_logs": 4, "list_checkpoints": 4,
    "list_events": 9, "list_alerts": 2, "count_unread_alerts": 3, "show_storage": 3,
    "list_storage": 5, "list_trash": 2, "list_views": 4, "show_charts": 5,
    "show_queue": 7, "show_cluster": 7, "list_quotas": 6, "list_teams": 4,
    "show_team": 5, "list_members": 3, "list_audit_entries": 6, "list_webhooks": 5,
    "who_am_i": 4, "list_tokens": 4,
}  # fmt: skip
# They read while they are sent.
STREAMED = {"stream", "download_checkpoint", "download_metrics", "download_logs", "download_compared_samples"}
READING = {name: row for name, row in OPERATIONS.items() if row.method == "get" and name not in STREAMED}


def several(row, count=4, **others):
    """So many more rows like this one, whose values at `others` are raised."""
    for number in range(1, count + 1):
        again = type(row)(**{f.attname: getattr(row, f.attname) for f in row._meta.concrete_fields if not f.primary_key})
        for name in others:
            setattr(again, name, getattr(row, name) + number)
        again.save()


def grow(world, scene):
    """More of everything that a list could have."""
    ada = world.people["ada"]
    for model, numbered in ((SampleRow, ["step"]), (LogLine, []), (Decision, ["step"]), (Transition, [])):
        several(model.objects.first(), **dict.fromkeys(numbered))
    several(Checkpoint.objects.get(pk=scene["checkpoint"]), step=None)
    for number in range(4):
        world.submit()
        lifecycle.cancel_run(world.submit().pk, "user:ada")
        change_tags(scene["run"], [f"tag{number}"], [], "user:ada")
        save_view(ada, f"view {number}", {"q": "state:queued"}, world.team)
        add_webhook(ada, world.team, f"https://example.org/{number}", ["failed"])
        create_service_token(ada, world.team, f"nightly {number}", None, "read")
        Project.objects.create(team=world.team, name=f"project {number}", created_at=world.clock.now())
        open_alert(Run.objects.get(pk=scene["waiting"]), list(Condition)[number], "why", 1.0, 2.0)
        world.worker(f"further{number}")
    world.cycle()


@pytest.fixture
def counted(world, scene, client):
    """Queries of an operation by its name, made with a token as the command line makes it."""
    token = create_api_token(world.people["ada"], world.team, "counting", None, "admin").text

    def count(name):
        path, _ = READING[name].filled(scene)
        address, headers = f"/api/v1/{path}", {"Authorization": f"Bearer {token}"}
        client.get(address, headers=headers)  # what is read once per process or minute
        with CaptureQueriesContext(connection) as queries:
            reply = client.get(address, headers=headers)
            assert reply.status_code == 200, (name, reply.content[:200])
        return len(queries)

    return count


def test_every_operation_makes_the_queries_of_the_table_with_few_rows_and_with_many(world, scene, counted):
    few = {name: counted(name) for name in READING}
    assert few == QUERIES
    grow(world, scene)
    assert {name: counted(name) for name in READING} == few


def test_submitting_reads_nothing_twice(world, scene, make_spec):
    """Checks, defaults and plan of one request see the same workers and queue."""
    client = world.login("ada")
    for _ in range(2):  # the first one reads what is read once per process
        with CaptureQueriesContext(connection) as queries:
            reply = client.post("/api/v1/runs", {"spec": make_spec()}, content_type="application/json")
            assert reply.status_code == 201
    reads = Counter(query["sql"] for query in queries if query["sql"].startswith("SELECT"))
    assert max(reads.values()) == 1
