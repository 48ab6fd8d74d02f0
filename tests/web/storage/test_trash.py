"""Deleting runs: the trash, what is refused, what is left of a purge, and every race in both orders."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from django.db import connection, transaction

from oppo_contract.safe_delete import file_url_path
from oppo_platform.accounts.models import AuditEntry
from oppo_platform.alerts.models import Alert
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.models import Allocation, Attempt, Change, Checkpoint, Run, Transition
from oppo_platform.runs.pins import pin
from oppo_platform.scheduling.usage import decayed_usage
from oppo_platform.storage import bulk_delete, purging
from oppo_platform.storage.models import Deletion, FolderDeletion, RunStorage
from oppo_platform.storage.purging import purge
from oppo_platform.storage.trash import DeletionRefused, delete_run, restore_run
from oppo_platform.telemetry.models import Block, Decision, HotPoints, LogLine, ProducerMark, SampleRow, Series, SpanBatch
from tests.web.event_factories import end, register, run_round, tell_everything
from tests.web.locks import wait_for_lock

TELEMETRY = (
    Block,
    Decision,
    HotPoints,
    LogLine,
    ProducerMark,
    SampleRow,
    Series,
    SpanBatch,
    Checkpoint,
    Change,
    Transition,
    RunStorage,
    Alert,
)
DAY_S = 86_400


@pytest.fixture
def ended(world, events, settings, tmp_path):
    """(world, worker, run, attempt id): a run that told everything, with a checkpoint on a shared disk, and succeeded."""
    settings.OPPO_ARTIFACT_ROOT, settings.OPPO_ARTIFACTS_SHARED = tmp_path.as_uri(), True
    settings.OPPO_NODE_FRESH_S = 1e9
    worker = world.worker()
    run, attempt_id = world.start(worker)
    tell_everything(worker, attempt_id, events)
    register(worker, run, attempt_id, 5)
    world.clock.advance(100)
    end(worker, attempt_id)
    return world, worker, run, attempt_id


def rows():
    """Rows of telemetry in the database."""
    return {model.__name__: model.objects.count() for model in TELEMETRY if model.objects.exists()}


def test_a_deleted_run_is_on_no_list_and_can_be_restored_whole(ended):
    world, _, run, _ = ended
    ada = world.login("ada")
    before = ada.get(f"/api/v1/runs/{run.pk}/metrics?keys=m").json(), rows()["SampleRow"]
    reply = ada.delete(f"/api/v1/runs/{run.pk}")
    assert (reply.status_code, reply.json()["by"], reply.json()["restorable_until"]) == (200, "ada", "2026-11-08T12:01:40Z")
    assert ada.get("/api/v1/runs").json()["items"] == []
    for path in ("", "/metrics?keys=m", "/samples", "/checkpoints"):
        assert ada.get(f"/api/v1/runs/{run.pk}{path}").status_code == 404
    assert [item["name"] for item in ada.get("/api/v1/trash").json()["items"]] == ["demo"]
    assert ada.delete(f"/api/v1/runs/{run.pk}").status_code == 404
    world.clock.advance(6 * DAY_S)
    run_round()
    assert ada.post(f"/api/v1/runs/{run.pk}/restore").json()["state"] == "succeeded"
    run_round()
    assert (ada.get(f"/api/v1/runs/{run.pk}/metrics?keys=m").json(), rows()["SampleRow"]) == before
    assert ada.get("/api/v1/trash").json()["items"] == []
    told = [e["what"] for e in ada.get(f"/api/v1/runs/{run.pk}/events?kinds=change").json()["items"]]
    assert told == ["restored", "deleted"]
    assert list(AuditEntry.objects.filter(action__startswith="run.").order_by("id").values_list("action", "actor"))[-2:] == [
        ("run.delete", "user:ada"), ("run.restore", "user:ada")
    ]  # fmt: skip


def test_permission_to_delete(ended):
    world, _, run, _ = ended
    assert world.login("eve").delete(f"/api/v1/runs/{run.pk}").status_code == 404
    for name in ("vic", "ben"):  # ada's run
        assert world.login(name).delete(f"/api/v1/runs/{run.pk}").status_code == 403
    assert world.login("max").delete(f"/api/v1/runs/{run.pk}").status_code == 200
    assert world.login("eve").get("/api/v1/trash").json()["items"] == []
    assert world.login("eve").post(f"/api/v1/runs/{run.pk}/restore").status_code == 404
    for name in ("vic", "ben"):
        assert world.login(name).post(f"/api/v1/runs/{run.pk}/restore").status_code == 403
        assert world.login(name).post(f"/api/v1/runs/{run.pk}/purge").status_code == 403
    assert world.login("ada").post(f"/api/v1/runs/{run.pk}/restore").status_code == 200


def test_only_ended_runs_are_deleted(world):
    run, _ = world.start(world.worker())
    reply = world.login("ada").delete(f"/api/v1/runs/{run.pk}")
    assert (reply.status_code, reply.json()["detail"]) == (
        409, "demo is running. Only ended runs can be deleted: cancel it first."
    )  # fmt: skip


def test_purged_run_leaves_a_tombstone_with_its_usage(ended, settings):
    world, _, run, attempt_id = ended
    folder = file_url_path(artifact_url(run.pk))
    used = decayed_usage(world.clock.now())[world.team.pk]
    world.login("ada").delete(f"/api/v1/runs/{run.pk}")
    world.clock.advance(7 * DAY_S + 1)
    run_round()
    assert rows() == {}
    assert not folder.exists()
    assert folder.parent.exists()
    run.refresh_from_db()
    assert (run.spec, run.latest, run.state, run.name) == ({}, {}, "succeeded", "demo")
    assert not FolderDeletion.objects.exists()
    assert Allocation.objects.filter(attempt=attempt_id).exists()
    assert 0 < decayed_usage(world.clock.now())[world.team.pk] <= used
    assert world.login("ada").post(f"/api/v1/runs/{run.pk}/restore").status_code == 404
    with pytest.raises(DeletionRefused, match="permanently"):
        restore_run(run.pk, "user:ada")
    world.clock.advance(settings.OPPO_TOMBSTONE_DAYS * DAY_S + 1)
    run_round()
    assert not Run.objects.exists()


def test_late_events_of_a_purged_run_are_refused_for_good_and_of_one_in_the_trash_kept(ended, events):
    world, worker, run, attempt_id = ended
    delete_run(run.pk, "user:ada")
    late = [events.step(26, 7, m=7.0)]
    assert worker.send_events(attempt_id, late).json() == {"high_water": 26}
    world.login("ada").post(f"/api/v1/runs/{run.pk}/purge")
    purge()
    reply = worker.send_events(attempt_id, [events.step(27, 8, m=8.0)])
    assert (reply.status_code, reply.json()) == (
        409, {"detail": f"Run {run.pk} has been deleted; its events are no longer stored.", "reason": "ended"}
    )  # fmt: skip
    assert rows() == {}


def test_rows_go_in_bounded_batches(ended, monkeypatch):
    _, _, run, _ = ended
    run_round()
    monkeypatch.setattr(bulk_delete, "BATCH_ROWS", 2)
    monkeypatch.setattr(purging, "MOST_BATCHES", 3)
    delete_run(run.pk, "user:ada")
    Deletion.objects.update(due_at=run.created_at)
    counts = []
    while rows():
        before = sum(rows().values())
        purge()
        counts.append(before - sum(rows().values()))
    assert max(counts) <= 2 * 3
    purge()
    assert Deletion.objects.get().ended_at is not None
    assert Deletion.objects.get().rows == sum(counts)


@pytest.mark.parametrize("first", ["ingest", "purge"])
def test_a_purge_and_a_batch_at_the_same_time(ended, events, at_once, first):
    """Whoever has the run's row first: nothing is left of the run, and whoever was told 200 was told so before."""
    _, worker, run, attempt_id = ended
    delete_run(run.pk, "user:ada")
    Deletion.objects.update(due_at=run.created_at)
    holds, go_on = threading.Event(), threading.Event()

    def holder():
        with transaction.atomic():
            if first == "ingest":
                from oppo_contract.events import EVENT_ADAPTER
                from oppo_platform.telemetry.ingest import ingest

                ingest(attempt_id, "engine", [EVENT_ADAPTER.validate_python(events.step(26, 7, m=7.0))])
            else:
                assert purging._start_purge(run.pk)
            holds.set()
            go_on.wait(20)

    def other():
        holds.wait(20)
        waiting = threading.Thread(target=lambda: (wait_for_lock(), connection.close(), go_on.set()))
        waiting.start()
        try:
            return purge() if first == "ingest" else worker.send_events(attempt_id, [events.step(26, 7, m=7.0)]).status_code
        finally:
            waiting.join()

    results = at_once(holder, other)
    assert results[0] is None
    assert results[1] > 0 if first == "ingest" else results[1] == 409
    purge()
    assert rows() == {}


def test_concurrent_housekeepers_purge_once(ended, at_once, monkeypatch):
    _, _, run, _ = ended
    monkeypatch.setattr(bulk_delete, "BATCH_ROWS", 1)
    delete_run(run.pk, "user:ada")
    Deletion.objects.update(due_at=run.created_at)
    there = sum(rows().values())
    results = at_once(purge, purge)
    assert all(isinstance(each, int) for each in results), results
    purge()
    assert rows() == {}
    assert Deletion.objects.get().rows == there


def test_a_restore_and_a_purge_at_once_end_whole_or_gone(ended, at_once):
    _, _, run, _ = ended
    before = rows()
    delete_run(run.pk, "user:ada")
    Deletion.objects.update(due_at=run.created_at)
    restored, _ = at_once(lambda: restore_run(run.pk, "user:ada"), purge)
    purge()
    if isinstance(restored, DeletionRefused):
        assert rows() == {}
    else:
        assert {name: n for name, n in rows().items() if name != "Change"} == {n: c for n, c in before.items() if n != "Change"}


def test_a_run_whose_checkpoint_another_begins_with_stays(ended):
    world, _, run, _ = ended
    other = world.submit(name="fork")
    world.cycle()
    Attempt.objects.filter(run=other).update(resume_from=Checkpoint.objects.get(run=run))
    reply = world.login("ada").delete(f"/api/v1/runs/{run.pk}")
    assert (reply.status_code, reply.json()["detail"]) == (
        409, f"fork (run {other.pk}) starts from a checkpoint of demo. Delete it after they have ended."
    )  # fmt: skip
    world.login("ada").post(f"/api/v1/runs/{other.pk}/cancel")
    assert world.login("ada").delete(f"/api/v1/runs/{run.pk}").status_code == 200


def test_folders_on_a_nodes_own_disk_are_deleted_by_its_agent(ended, settings):
    world, worker, run, _ = ended
    settings.OPPO_ARTIFACTS_SHARED = False
    settings.OPPO_ARTIFACT_ROOT = Path("/nowhere/at/all").as_uri()
    delete_run(run.pk, "user:ada")
    Deletion.objects.update(due_at=run.created_at)
    assert worker.heartbeat()["delete"] == []
    run_round()
    order = worker.heartbeat()["delete"]
    assert order == [{"id": order[0]["id"], "run_id": run.pk, "url": artifact_url(run.pk)}]
    stranger = world.worker("node2")
    done = {"devices": [], "attempts": [], "deleted": [{"id": order[0]["id"]}]}
    assert stranger.post("heartbeat", done, stranger.token).json()["delete"] == []
    failed = {"devices": [], "attempts": [], "deleted": [{"id": order[0]["id"], "error": "read-only"}]}
    assert worker.post("heartbeat", failed, worker.token).json()["delete"] == []
    assert FolderDeletion.objects.get().error == "read-only"
    told = world.login("vic").get("/api/v1/storage").json()["items"][0]["to_delete"]
    assert told == [{"run": run.pk, "node": "node1", "bytes": 1000, "error": "read-only"}]
    page = world.login("vic").get(f"/teams/{world.team.pk}/storage").content.decode()
    assert "The last attempt failed: read-only" in " ".join(page.split())
    world.clock.advance(301)
    assert worker.heartbeat()["delete"] == order  # again, later
    assert worker.post("heartbeat", done, worker.token).json()["delete"] == []
    assert not FolderDeletion.objects.exists()
    assert settings.OPPO_ARTIFACT_ROOT  # nobody needed it here


@pytest.mark.parametrize("first", ["pin", "delete"])
def test_a_pinned_baseline_is_not_deleted_and_what_is_deleted_not_pinned(ended, at_once, first):
    world, _, run, _ = ended
    deeds = {"pin": lambda: pin(run.pk, "user:ada"), "delete": lambda: delete_run(run.pk, "user:ada")}
    deeds[first]()
    second = next(deed for name, deed in deeds.items() if name != first)
    with pytest.raises(DeletionRefused if first == "pin" else Run.DoesNotExist):
        second()
    run.refresh_from_db()
    world.project.refresh_from_db()
    assert (run.deleted_at is None) == (world.project.pinned_id == run.pk) == (first == "pin")
    assert world.login("ada").get("/runs").status_code == 200


def test_a_pin_and_a_deletion_at_once(ended, at_once):
    _, _, run, _ = ended
    results = at_once(lambda: pin(run.pk, "user:ada"), lambda: delete_run(run.pk, "user:ada"))
    assert sum(isinstance(each, DeletionRefused | Run.DoesNotExist) for each in results) == 1


def test_pages_of_the_trash(ended):
    world, _, run, _ = ended
    ada, vic = world.login("ada"), world.login("vic")
    assert "delete-dialog" in ada.get(f"/runs/{run.pk}").content.decode()
    assert "delete-dialog" not in vic.get(f"/runs/{run.pk}").content.decode()
    delete_run(run.pk, "user:ada")
    for tab in ("", "/timeline", "/checkpoints"):
        page = ada.get(f"/runs/{run.pk}{tab}")
        assert page.status_code == 200
        assert ">Restore</button>" in page.content.decode()
    assert ">Restore</button>" not in vic.get(f"/runs/{run.pk}").content.decode()
    assert world.login("eve").get(f"/runs/{run.pk}").status_code == 404
    address = f"/teams/{world.team.pk}/storage"
    assert f"purge-{run.pk}" in ada.get(address).content.decode()
    assert f"purge-{run.pk}" not in vic.get(address).content.decode()
    assert world.login("eve").get(address).status_code == 404
    assert vic.post(f"/runs/{run.pk}/restore").status_code == 403
    assert ada.post(f"/runs/{run.pk}/restore").headers["Location"] == f"/runs/{run.pk}"
    assert ada.get(f"/runs/{run.pk}").status_code == 200
    assert ada.post(f"/runs/{run.pk}/purge").status_code == 404
    delete_run(run.pk, "user:ada")
    assert ada.post(f"/runs/{run.pk}/purge").headers["Location"] == address
    run_round()
    assert ada.get(f"/runs/{run.pk}").status_code == 404
    assert "The trash is empty" in ada.get(address).content.decode()


def test_space_does_not_grow_over_many_rounds(world, events, settings, tmp_path):
    """Runs come and go: the tables of telemetry are as large after the last round as after the first few."""
    settings.OPPO_TRASH_DAYS, settings.OPPO_ARTIFACT_ROOT = 0, tmp_path.as_uri()
    worker = world.worker()
    sizes = []
    for _ in range(5):
        run, attempt_id = world.start(worker)
        tell_everything(worker, attempt_id, events, steps=40)
        end(worker, attempt_id)
        delete_run(run.pk, "user:ada")
        run_round()
        assert rows() == {}
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relname LIKE 'telemetry_%%' AND relkind = 'r'"
            )
            sizes.append(int(cursor.fetchone()[0]))
    assert max(sizes[3:]) <= max(sizes[:3]), sizes
