"""Retention: what is deleted when, what never, that it is told, and every race in both orders."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from oppo_contract.safe_delete import file_url_path
from oppo_platform.accounts.access import Action, permits
from oppo_platform.accounts.models import AuditEntry
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.labels import change_tags
from oppo_platform.runs.models import Attempt, Checkpoint, Run
from oppo_platform.runs.pins import pin
from oppo_platform.storage import bulk_delete, retention
from oppo_platform.storage.models import RunStorage, TeamStorage
from oppo_platform.storage.retention import apply_retention, set_retention
from oppo_platform.storage.trash import restore_run
from oppo_platform.telemetry.models import Block, Decision, LogLine, SampleRow, SpanBatch
from tests.web.event_factories import end, register, run_round, tell_everything

DAY_S = 86_400


@pytest.fixture
def ended(world, events, settings, tmp_path):
    """(world, run): a run that told everything and ended, with three checkpoints."""
    settings.OPPO_ARTIFACT_ROOT, settings.OPPO_ARTIFACTS_SHARED = tmp_path.as_uri(), True
    settings.OPPO_NODE_FRESH_S = settings.OPPO_LEASE_S = 1e9
    worker = world.worker()
    run, attempt_id = world.start(worker)
    tell_everything(worker, attempt_id, events)
    for step in (2, 4, 6):
        register(worker, run, attempt_id, step)
    end(worker, attempt_id)
    run_round()
    return world, run


def rule(world, detail_days=None, run_days=None, keep_checkpoints=None, grace=True):
    """Set by the owner; without grace it was set long ago."""
    set_retention(world.people["ada"], world.team, detail_days, run_days, keep_checkpoints)
    if not grace:
        TeamStorage.objects.update(retention_set_at=world.clock.now() - timedelta(days=2))


def detail():
    return SpanBatch.objects.count() + SampleRow.objects.count() + LogLine.objects.count()


def told(world, run):
    items = world.login("vic").get(f"/api/v1/runs/{run.pk}/events?kinds=change").json()["items"]
    return [(item["actor"], item["text"]) for item in items]


def test_nothing_is_deleted_without_a_rule(ended):
    world, run = ended
    before = detail()
    world.clock.advance(1000 * DAY_S)
    run_round()
    assert (detail(), Checkpoint.objects.count(), Run.objects.get(pk=run.pk).deleted_at) == (before, 3, None)


def test_a_new_rule_waits_a_day_and_says_what_it_will_delete(ended):
    world, _ = ended
    world.clock.advance(100 * DAY_S)
    rule(world, detail_days=30, run_days=365, keep_checkpoints=1)
    run_round()
    before = detail()
    assert before > 0
    page = world.login("vic").get(f"/teams/{world.team.pk}/storage").content.decode()
    assert "timeline, samples and logs" in page
    assert "2 checkpoints" in page
    assert "the whole run" in page
    world.clock.advance(DAY_S - 1)
    run_round()
    assert detail() == before
    world.clock.advance(1)
    run_round()
    assert (detail(), Checkpoint.objects.count()) == (0, 1)


def test_detail_goes_curves_stay_and_the_pages_say_so(ended):
    world, run = ended
    rule(world, detail_days=30, grace=False)
    vic = world.login("vic")
    curves = vic.get(f"/api/v1/runs/{run.pk}/metrics?keys=m").json()
    taken = RunStorage.objects.get(run=run).bytes
    world.clock.advance(30 * DAY_S - 1)
    run_round()
    assert detail() > 0
    world.clock.advance(61)
    run_round()
    assert detail() == 0
    assert Block.objects.exists()
    assert Decision.objects.exists()
    assert vic.get(f"/api/v1/runs/{run.pk}/metrics?keys=m").json() == curves
    assert told(world, run) == [
        ("retention", "Timeline, samples and logs were deleted: the team keeps them for 30 days after a run has ended.")
    ]
    row = RunStorage.objects.get(run=run)
    assert (row.timeline, row.samples, row.logs, row.detail_pending) == (0, 0, 0, False)
    assert row.bytes < taken
    for tab in ("timeline", "samples", "logs"):
        page = vic.get(f"/runs/{run.pk}/{tab}").content.decode()
        assert "deleted by the team’s retention rules" in page
        assert "2026-12-01" in page
    assert "The samples were deleted" in vic.get(f"/runs/{run.pk}").content.decode()
    assert vic.get(f"/api/v1/runs/{run.pk}/storage").json()["detail_deleted_at"].startswith("2026-12-01")


def test_runs_go_into_the_trash_and_one_that_is_restored_is_kept(ended):
    world, run = ended
    rule(world, run_days=10, grace=False)
    world.clock.advance(10 * DAY_S)
    run_round()
    assert [item["by"] for item in world.login("ada").get("/api/v1/trash").json()["items"]] == ["retention"]
    assert AuditEntry.objects.filter(action="run.delete").get().actor == "retention"
    restore_run(run.pk, "user:ada")
    world.clock.advance(100)
    run_round()
    run.refresh_from_db()
    assert (run.deleted_at, run.tags) == (None, ["keep"])


def test_only_the_newest_checkpoints_of_an_ended_run_stay(ended):
    world, run = ended
    other = world.submit(name="waits")
    rule(world, keep_checkpoints=1, grace=False)
    run_round()
    folder = file_url_path(artifact_url(run.pk)) / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000006"]
    assert list(Checkpoint.objects.values_list("step", flat=True)) == [6]
    assert told(world, run) == [
        ("retention", "Checkpoints of step 2, 4 were deleted: the team keeps the latest 1 of an ended run.")
    ]
    assert told(world, other) == []
    world.clock.advance(100)
    run_round()
    assert len(told(world, run)) == 1
    assert RunStorage.objects.get(run=run).settled


def test_the_newer_attempt_counts_and_a_folder_that_both_wrote_stays(ended):
    world, run = ended
    first = run.attempts.get()
    Run.objects.filter(pk=run.pk).update(epochs=2)
    second = Attempt.objects.create(run=run, node=first.node, epoch=2, state="running", created_at=first.created_at, start_step=2,
                                    lease_expires_at=first.lease_expires_at)  # fmt: skip
    again = Checkpoint.objects.get(run=run, step=4)
    again.pk, again.attempt = None, second
    again.save()
    Attempt.objects.filter(pk=second.pk).update(state="ended")
    rule(world, keep_checkpoints=1, grace=False)
    run_round()
    folder = file_url_path(artifact_url(run.pk)) / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]
    assert list(Checkpoint.objects.values_list("step", "attempt__epoch")) == [(4, 2)]


@pytest.mark.parametrize("why", ["keep", "pinned", "fork", "running", "trash"])
def test_exempt_runs_are_not_changed(ended, why):
    world, run = ended
    before = detail()
    if why == "keep":
        change_tags(run.pk, ["keep"], [], "user:ada")
    elif why == "pinned":
        pin(run.pk, "user:ada")
    elif why == "fork":
        other = world.submit(name="fork")
        world.cycle()
        Attempt.objects.filter(run=other).update(resume_from=Checkpoint.objects.filter(run=run).first())
    elif why == "running":
        Run.objects.filter(pk=run.pk).update(state="paused", ended_at=None)
    else:
        world.login("ada").delete(f"/api/v1/runs/{run.pk}")
    world.clock.advance(5 * DAY_S)
    rule(world, 1, 1, 1, grace=False)
    run_round()
    assert (detail(), Checkpoint.objects.filter(run=run).count()) == (before, 3)
    assert (Run.objects.get(pk=run.pk).deleted_at is not None) == (why == "trash")


@pytest.mark.parametrize("deed", ["keep", "pin"])
def test_somebody_keeps_a_run_while_its_turn_comes(ended, at_once, deed):
    """Whoever has the run's row first: it is kept whole, or was deleted before it was kept."""
    world, run = ended
    world.clock.advance(5 * DAY_S)
    rule(world, run_days=1, grace=False)
    keeps = {"keep": lambda: change_tags(run.pk, ["keep"], [], "user:ada"), "pin": lambda: pin(run.pk, "user:ada")}[deed]
    kept, unprotected_runs = at_once(keeps, apply_retention)
    run.refresh_from_db()
    assert isinstance(unprotected_runs, int)
    if deed == "pin":
        assert (run.deleted_at is not None) == isinstance(kept, Run.DoesNotExist) == (unprotected_runs == 1)
    else:
        assert (run.deleted_at is not None) == (unprotected_runs == 1)


def test_concurrent_housekeepers_apply_retention_once(ended, at_once):
    world, run = ended
    world.clock.advance(5 * DAY_S)
    rule(world, detail_days=1, keep_checkpoints=2, grace=False)
    results = at_once(apply_retention, apply_retention)
    assert all(isinstance(each, int) for each in results), results
    assert sum(results) == 2
    assert detail() == 0
    assert len(told(world, run)) == 2


def test_round_is_bounded_and_the_next_continues(ended, monkeypatch):
    world, run = ended
    monkeypatch.setattr(bulk_delete, "BATCH_ROWS", 2)
    monkeypatch.setattr(retention, "MOST_BATCHES", 2)
    world.clock.advance(5 * DAY_S)
    rule(world, detail_days=1, grace=False)
    left, rounds = detail(), 0
    while detail():
        apply_retention()
        assert left - detail() <= 4
        left, rounds = detail(), rounds + 1
    assert rounds > 2
    apply_retention()
    assert not RunStorage.objects.get(run=run).detail_pending
    assert len(told(world, run)) == 1


def test_a_retry_ends_the_deletion_of_detail(ended, monkeypatch):
    """Between two batches the run is queued again: what its next attempt writes must stay."""
    world, run = ended
    monkeypatch.setattr(bulk_delete, "BATCH_ROWS", 2)
    world.clock.advance(5 * DAY_S)
    rule(world, detail_days=1, grace=False)
    delete, counts = retention.delete_batch, []

    def once(run_id, tables):
        deleted = delete(run_id, tables)
        retention.on_reopen(run_id)
        counts.append(detail())
        return deleted

    monkeypatch.setattr(retention, "delete_batch", once)
    apply_retention()
    assert counts == [detail()]
    assert detail() > 0
    assert RunStorage.objects.get(run=run).detail_deleted_at is None


@hypothesis(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ages=st.lists(st.integers(0, 60), min_size=1, max_size=6), run_days=st.none() | st.integers(1, 50))
def test_exactly_the_old_runs_are_deleted(ended, ages, run_days):
    world, first = ended
    now = world.clock.now()
    Run.objects.exclude(pk=first.pk).delete()
    Run.objects.filter(pk=first.pk).update(ended_at=now)
    made = [world.submit(name=f"age {age}") for age in ages]
    for run, age in zip(made, ages, strict=True):
        Run.objects.filter(pk=run.pk).update(state="succeeded", ended_at=now - timedelta(days=age))
    TeamStorage.objects.filter(team=world.team).update(
        run_days=run_days, detail_days=None, keep_checkpoints=None, retention_set_at=now - timedelta(days=2), retained_at=None
    )
    apply_retention()
    deleted = set(Run.objects.filter(deleted_at__isnull=False).values_list("pk", flat=True))
    assert deleted == {run.pk for run, age in zip(made, ages, strict=True) if run_days is not None and age >= run_days}


def test_owners_set_it_and_it_is_on_record(ended):
    world, _ = ended
    address = f"/teams/{world.team.pk}/storage/rules"
    for name in ("vic", "ben", "max"):
        assert world.login(name).post(address, {"run_days": "1"}).status_code == 403
    assert world.login("eve").post(address, {"run_days": "1"}).status_code == 404
    assert not any(permits(role, Action.MANAGE_STORAGE) for role in ("viewer", "member", "maintainer"))
    ada = world.login("ada")
    for wrong in ("0", "-1", "x", "99999999", "1e3"):
        reply = ada.post(address, {"detail_days": wrong, "keep_checkpoints": "7"})
        page = reply.content.decode()
        assert "days, or leave empty" in page or "Enter integers" in page
        assert (reply.status_code, re.findall(r'type="number"\s+min="1"\s+value="(.*?)"', page)) == (422, [wrong, "", "7"])
    assert world.login("ben").post(address, {"run_days": "x"}).status_code == 403
    assert not TeamStorage.objects.filter(retention_set_at__isnull=False).exists()
    ada.post(address, {"detail_days": "30", "run_days": "", "keep_checkpoints": "2"})
    row = TeamStorage.objects.get(team=world.team)
    assert (row.detail_days, row.run_days, row.keep_checkpoints) == (30, None, 2)
    assert AuditEntry.objects.last().details == {"detail_days": 30, "run_days": None, "keep_checkpoints": 2}
    world.clock.advance(100)
    ada.post(address, {"detail_days": "30", "run_days": "", "keep_checkpoints": "2"})
    assert TeamStorage.objects.get(team=world.team).retention_set_at == row.retention_set_at  # nothing has changed
