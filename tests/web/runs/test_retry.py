"""A user's retry of a failed run: from its last checkpoint, once; earlier failures no longer count."""

from __future__ import annotations

import pytest

from oppo_contract.safe_delete import file_url_path
from oppo_contract.states import RunState
from oppo_platform.alerts import evaluator
from oppo_platform.alerts.models import Alert
from oppo_platform.cluster.models import Node
from oppo_platform.runs.attempts import artifact_url, describe_resume
from oppo_platform.runs.lifecycle import NotPossible
from oppo_platform.runs.models import Run
from oppo_platform.runs.retry import retry_run
from oppo_platform.runs.selectors import get_run, run_summary
from oppo_platform.storage.artifact_deletion import delete_local_folders, deletion_orders, request_deletion
from oppo_platform.storage.models import FolderDeletion, RunStorage
from oppo_platform.storage.trash import delete_run
from tests.web.event_factories import register, tell_everything

ADA = "user:ada"


@pytest.fixture
def failed(world, events, settings, tmp_path):
    """(world, worker, a run that failed at step 6 and has a checkpoint of step 4)."""
    settings.OPPO_ARTIFACT_ROOT = tmp_path.as_uri()
    worker = world.worker()
    run, attempt_id = world.start(worker, retries={"attempts": 1, "backoff_s": 0})
    tell_everything(worker, attempt_id, events)
    register(worker, run, attempt_id, 4)
    (tmp_path / f"runs/{run.pk}/checkpoints/step-00000004/manifest.json").write_text("{}")
    fail(worker, attempt_id, 1)
    run.refresh_from_db()
    assert run.state == "failed"
    return world, worker, run


def fail(worker, attempt_id, epoch):
    outcome = {"epoch": epoch, "outcome": "engine_died", "reason": "killed", "last_log_lines": ["out of luck"]}
    assert worker.attempt(attempt_id, "outcome", outcome).status_code == 200


def start_again(world, worker, run):
    world.cycle()
    attempt = run.attempts.get(epoch=2)
    assert worker.claim(attempt.pk, 2).json()["resume_from"]["step"] == 4
    return attempt.pk


def test_it_is_queued_from_its_last_checkpoint_and_ended_no_more(failed):
    world, worker, run = failed
    wishes = run_summary(get_run(world.people["ada"], run.pk))["wishes"]
    assert wishes["retry"] == "A retry queues this run again. It resumes from step 4; earlier failures no longer count."
    world.clock.advance(5)
    reply = world.login("ada").post(f"/api/v1/runs/{run.pk}/retry").json()
    assert (reply["state"], reply["reason"]) == ("queued", "Retried by ada. Resumes from step 4.")
    assert (reply["ended_at"], reply["error"], reply["last_log_lines"]) == (None, "", [])
    assert "retry" not in reply["wishes"]
    run.refresh_from_db()
    assert run.queued_at == world.clock.now()
    start_again(world, worker, run)


def test_its_failures_count_anew(failed):
    world, worker, run = failed
    Run.objects.filter(pk=run.pk).update(spec=run.spec | {"retries": {"attempts": 2, "backoff_s": 0}})
    retry_run(run.pk, ADA)
    fail(worker, start_again(world, worker, run), 2)
    run.refresh_from_db()
    assert (run.state, run.reason) == ("queued", "The engine died: killed. Resumes from step 4. Attempt 2 of 2 is next.")


def test_the_second_end_is_announced_too(failed):
    world, worker, run = failed
    evaluator.announce_end(run.pk)
    retry_run(run.pk, ADA)
    fail(worker, start_again(world, worker, run), 2)
    evaluator.announce_end(run.pk)
    assert Alert.objects.filter(run=run, condition="failed").count() == 2


def test_an_end_that_was_not_announced_is_withdrawn(failed):
    world, worker, run = failed
    retry_run(run.pk, ADA)
    assert evaluator.announce_end(run.pk) == 0
    fail(worker, start_again(world, worker, run), 2)
    evaluator.announce_end(run.pk)
    assert Alert.objects.filter(run=run, condition="failed").count() == 1


def test_two_clicks_at_once_retry_once(failed, at_once):
    _, _, run = failed
    results = at_once(*[lambda: retry_run(run.pk, ADA)] * 2)
    assert sorted(type(result).__name__ for result in results) == ["NotPossible", "Run"]
    assert run.transitions.filter(old="failed", new="queued").count() == 1


def test_refused_where_it_would_start_elsewhere(failed, tmp_path):
    _, _, run = failed
    (tmp_path / f"runs/{run.pk}/checkpoints/step-00000004/manifest.json").unlink()
    with pytest.raises(NotPossible, match="files of its last checkpoint, step 4, were deleted"):
        retry_run(run.pk, ADA)
    run.checkpoints.all().delete()
    Run.objects.filter(pk=run.pk).update(forked_run=1)
    with pytest.raises(NotPossible, match="checkpoint of run 1 that it started from was deleted"):
        retry_run(run.pk, ADA)


def test_without_a_checkpoint_it_starts_anew(failed):
    world, _, run = failed
    run.checkpoints.all().delete()
    assert "restarts from step 0" in run_summary(get_run(world.people["ada"], run.pk))["wishes"]["retry"]
    assert describe_resume(retry_run(run.pk, ADA)) == "Restarts from step 0."


def test_refused_at_its_time_limit_and_in_the_trash(failed):
    _, _, run = failed
    Run.objects.filter(pk=run.pk).update(max_runtime_s=0.0)
    with pytest.raises(NotPossible, match="time limit is reached"):
        retry_run(run.pk, ADA)
    delete_run(run.pk, ADA)
    with pytest.raises(NotPossible, match="trash"):
        retry_run(run.pk, ADA)


@pytest.mark.parametrize("state", [state for state in RunState if state != RunState.FAILED])
def test_only_failed_runs(world, state):
    run = world.submit()
    Run.objects.filter(pk=run.pk).update(state=state)
    with pytest.raises(NotPossible, match="Only failed runs can be retried"):
        retry_run(run.pk, ADA)


def test_detail_that_retention_deleted_is_recorded_anew(failed):
    world, _, run = failed
    RunStorage.objects.create(run=run, settled=True, detail_deleted_at=world.clock.now(), measured_at=world.clock.now())
    retry_run(run.pk, ADA)
    row = RunStorage.objects.get(run=run)
    assert (row.settled, row.detail_deleted_at) == (False, None)


def test_a_deletion_from_before_the_retry_spares_what_the_next_attempt_saves(failed):
    """Retention removed the checkpoint of step 6, but its folder could not be deleted yet."""
    world, worker, run = failed
    url = f"{artifact_url(run.pk)}/checkpoints/step-00000006"
    file_url_path(url).mkdir()
    request_deletion(run, url, 1000)
    retry_run(run.pk, ADA)
    assert (delete_local_folders(), deletion_orders(Node.objects.get())) == (0, [])
    attempt_id = start_again(world, worker, run)
    checkpoint = {"epoch": 2, "step": 6, "url": url, "manifest_sha256": "0" * 64, "bytes": 1000}
    assert worker.attempt(attempt_id, "checkpoints", checkpoint).status_code == 200
    fail(worker, attempt_id, 2)
    run.refresh_from_db()
    assert run.state == "failed"
    assert deletion_orders(Node.objects.get()) == []
    delete_local_folders()
    assert file_url_path(url).exists()
    assert not FolderDeletion.objects.exists()
