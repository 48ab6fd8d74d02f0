"""What runs take: counted without walking everything, close to what the tables take, summed up, and limited by quotas."""

from __future__ import annotations

import json

import pytest
from django.db import connection
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from oppo_contract.byte_sizes import size
from oppo_contract.safe_delete import file_url_path
from oppo_platform.accounts.models import AuditEntry
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.models import Run
from oppo_platform.storage.models import RunStorage, TeamStorage
from oppo_platform.storage.quotas import QuotaUsage, set_storage_quota
from oppo_platform.storage.trash import delete_run
from oppo_platform.storage.usage import measure, measure_due_runs, update_team_totals
from oppo_platform.telemetry.models import ProducerMark
from tests.web.event_factories import end, every_kind, register, run_round, tell_everything

TABLES = {
    "series": ("telemetry_series", "telemetry_hotpoints", "telemetry_block"), "timeline": ("telemetry_spanbatch",),
    "samples": ("telemetry_samplerow",), "logs": ("telemetry_logline",),
}  # fmt: skip


@pytest.fixture
def running(world, settings, tmp_path):
    """(world, worker, run, attempt id): a run that trains, with artifacts on this machine."""
    settings.OPPO_ARTIFACT_ROOT, settings.OPPO_ARTIFACTS_SHARED = tmp_path.as_uri(), True
    settings.OPPO_NODE_FRESH_S = settings.OPPO_LEASE_S = 1e9
    worker = world.worker()
    return world, worker, *world.start(worker)


def on_disk(part):
    """What the tables of a part take, indexes and all, after they were written anew without holes."""
    total = 0
    with connection.cursor() as cursor:
        for table in TABLES[part]:
            cursor.execute(f"VACUUM FULL {table}")
            cursor.execute("SELECT pg_total_relation_size(%s)", [table])
            total += cursor.fetchone()[0]
    return total


def line(seq, count):
    lines = [f"step {n}: a line of a common length, with reward 0.{n} and kl 0.0{n}" for n in range(count)]
    return {"kind": "log", "producer": "supervisor", "seq": seq, "time": 1.0, "stream": "stdout", "lines": lines}


def test_the_estimate_is_close_to_what_the_tables_take(running, events):
    world, worker, run, attempt_id = running
    empty = {part: on_disk(part) for part in TABLES}
    tell_everything(worker, attempt_id, events, steps=240)
    assert worker.send_events(attempt_id, [line(2, 3000)], "supervisor").status_code == 200
    end(worker, attempt_id)
    run_round()
    row = RunStorage.objects.get(run=run)
    for part in ("timeline", "samples", "logs"):
        took = on_disk(part) - empty[part]
        assert 0.7 * took < getattr(row, part) < 1.4 * took, (part, getattr(row, part), took)
    assert 0 < row.series < on_disk("series")
    assert row.settled
    assert TeamStorage.objects.get(team=world.team).used_bytes == row.bytes == sum(getattr(row, p) for p in TABLES)


@hypothesis(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 25), max_size=4))
def test_counting_bit_by_bit_and_at_once_comes_to_the_same(running, events, cuts):
    """Whenever the housekeeper comes by, in the end everything was counted once."""
    _, worker, run, attempt_id = running
    told = every_kind(events, 6)
    high = ProducerMark.objects.filter(attempt=attempt_id, producer="engine").values_list("high_water", flat=True).first() or 0
    shifted = [{**event, "seq": event["seq"] + high, **later(event, high)} for event in told]
    for cut in [*sorted(cuts), len(told)]:
        batch = [event for event in shifted[:cut] if event["seq"] > high]
        assert not batch or worker.send_events(attempt_id, batch).status_code == 200
        measure(run.pk)
    Run.objects.filter(pk=run.pk).update(state="succeeded")
    measure(run.pk)
    bit_by_bit = parts(run)
    measure(run.pk, recount=True)
    assert parts(run) == bit_by_bit
    Run.objects.filter(pk=run.pk).update(state="running")


def later(event, high):
    """Steps go on from one example to the next."""
    return {"step": event["step"] + high} if "step" in event else {}


def parts(run):
    row = RunStorage.objects.get(run=run)
    return [row.timeline, row.samples, row.logs, row.series, row.checkpoints]


def test_checkpoints_count_while_their_files_are_there(running, settings):
    _, worker, run, attempt_id = running
    for step in (1, 2, 3):
        register(worker, run, attempt_id, step)
        (folder(run, step) / "manifest.json").write_text("{}")
    measure(run.pk)
    assert RunStorage.objects.get(run=run).checkpoints == 3000
    (folder(run, 1) / "manifest.json").unlink()
    measure(run.pk)
    assert RunStorage.objects.get(run=run).checkpoints == 2000
    settings.OPPO_ARTIFACT_ROOT = "s3://bucket"  # cannot be seen from here: as many as the run keeps
    measure(run.pk)
    assert RunStorage.objects.get(run=run).checkpoints == 2000


def folder(run, step):
    return file_url_path(artifact_url(run.pk)) / "checkpoints" / f"step-{step:08d}"


def test_a_run_that_goes_on_is_counted_now_and_then_and_one_that_ended_once(running, events, settings):
    world, worker, run, attempt_id = running
    settings.OPPO_MEASURE_S = 60
    assert measure_due_runs() == 1
    tell_everything(worker, attempt_id, events)
    assert measure_due_runs() == 0
    world.clock.advance(61)
    assert measure_due_runs() == 1
    grown = RunStorage.objects.get(run=run).bytes
    assert grown > 0
    end(worker, attempt_id)
    assert measure_due_runs() == 1  # at once
    assert RunStorage.objects.get(run=run).bytes > grown  # the newest step
    world.clock.advance(1e6)
    assert measure_due_runs() == 0
    delete_run(run.pk, "user:ada")
    settings.OPPO_TRASH_DAYS = 0
    world.clock.advance(8 * 86400)
    run_round()
    assert TeamStorage.objects.get(team=world.team).used_bytes == 0
    assert not RunStorage.objects.exists()


def test_late_history_of_an_ended_run_is_counted_too(running, events):
    _, worker, run, attempt_id = running
    tell_everything(worker, attempt_id, events, steps=3)
    end(worker, attempt_id)
    run_round()
    before = RunStorage.objects.get(run=run).bytes
    assert worker.send_events(attempt_id, [events.step(14, 4, m=1.0, late=2.0)]).status_code == 200
    run_round()
    assert RunStorage.objects.get(run=run).bytes > before


def fill(world, team, used):
    TeamStorage.objects.update_or_create(team=team, defaults={"used_bytes": used})


def test_a_full_team_submits_nothing_and_is_told_what_to_do(running, make_spec):
    world, worker, run, attempt_id = running
    ada = world.login("ada")
    set_storage_quota(world.team.pk, 10 * 2**30, world.people["ada"])
    RunStorage.objects.create(run=run, measured_at=world.clock.now(), checkpoints=9 * 2**30, logs=2 * 2**30)
    update_team_totals()
    reply = ada.post("/api/v1/runs", {"spec": make_spec()}, content_type="application/json")
    assert reply.status_code == 422
    said = reply.json()["errors"][0]["message"]
    assert "its runs use 11 GiB, and its quota is 10 GiB" in said
    assert f"demo (run {run.pk}, 11 GiB)" in said
    checked = ada.post("/api/v1/runs/validate", {"spec": make_spec()}, content_type="application/json").json()
    assert [p["message"] for p in checked["problems"]] == [said]
    # Another team is not concerned, and does not learn of it; what runs goes on.
    other = world.login("eve").post("/api/v1/runs", {"spec": make_spec()}, content_type="application/json")
    assert other.status_code == 201
    assert worker.attempt(attempt_id, "heartbeat", {"epoch": 1, "running": True}).status_code == 200
    set_storage_quota(world.team.pk, None)
    assert ada.post("/api/v1/runs", {"spec": make_spec()}, content_type="application/json").status_code == 201


def test_owners_are_warned_on_every_page_and_others_on_the_teams(running):
    world, *_ = running
    set_storage_quota(world.team.pk, 1000)
    fill(world, world.team, 799)
    assert "of storage" not in world.login("ada").get("/runs").content.decode()
    fill(world, world.team, 801)
    assert "New runs are rejected once it is full" in world.login("ada").get("/runs").content.decode()
    assert "of storage" not in world.login("ben").get("/runs").content.decode()
    assert "nearly full" in world.login("vic").get(f"/teams/{world.team.pk}/storage").content.decode()
    fill(world, world.team, 1001)
    assert "New runs are rejected until storage is freed" in world.login("ada").get("/queue").content.decode()


def test_administrators_set_quotas_and_nobody_else(running):
    world, *_ = running
    address = f"/sharing/teams/{world.team.pk}/storage"
    assert world.login("ada").post(address, {"gib": "5"}).status_code == 403
    world.people["max"].is_staff = True
    world.people["max"].save()
    client = world.login("max")
    client.post(address, {"gib": "0.5"})
    assert TeamStorage.objects.get(team=world.team).quota_bytes == 2**29
    assert (AuditEntry.objects.last().action, AuditEntry.objects.last().details) == ("quota.storage", {"bytes": 2**29})
    for wrong in ("x", "-1", "1e99", "nan", "inf"):
        assert "quota" in client.post(address, {"gib": wrong}, follow=True).content.decode()
        assert TeamStorage.objects.get(team=world.team).quota_bytes == 2**29, wrong
    client.post(address, {"gib": ""})
    assert TeamStorage.objects.get(team=world.team).quota_bytes is None


def test_storage_api(running, events):
    world, worker, run, attempt_id = running
    tell_everything(worker, attempt_id, events)
    measure_due_runs()
    vic, eve = world.login("vic"), world.login("eve")
    told = vic.get(f"/api/v1/runs/{run.pk}/storage").json()
    assert told["bytes"] == sum(told["parts"].values()) > 0
    item = next(each for each in vic.get("/api/v1/storage").json()["items"])
    assert (item["team"], item["used_bytes"], item["largest"][0]["id"]) == ("Letters", told["bytes"], run.pk)
    assert eve.get(f"/api/v1/runs/{run.pk}/storage").status_code == 404
    assert str(run.pk) not in json.dumps([each["largest"] for each in eve.get("/api/v1/storage").json()["items"]])
    assert '<h2 id="takes-title">Storage</h2>' in vic.get(f"/runs/{run.pk}/checkpoints").content.decode()
    assert f"size {size(told['bytes'])}" in vic.get(f"/runs/{run.pk}").content.decode()


def test_runs_are_filtered_and_sorted_by_disk_usage(running):
    world, _, run, _ = running
    small, unknown = world.submit(name="small"), world.submit(name="unknown")
    RunStorage.objects.create(run=run, measured_at=world.clock.now(), checkpoints=9 * 2**30)
    RunStorage.objects.create(run=small, measured_at=world.clock.now(), logs=2**29)
    vic = world.login("vic")

    def found(query):
        return [item["id"] for item in vic.get(f"/api/v1/runs?{query}").json()["items"]]

    assert found("filter=gib>5") == [run.pk]
    assert found("filter=gib<=0.5") == [small.pk]
    assert found("sort=-gib") == [run.pk, small.pk, unknown.pk]
    assert found("sort=gib") == [small.pk, run.pk, unknown.pk]


@pytest.mark.parametrize(("used", "quota", "nearly", "full"), [
    (0, None, False, False), (10**18, None, False, False), (79, 100, False, False), (80, 100, True, False),
    (100, 100, True, False), (101, 100, True, True), (0, 0, True, False), (1, 0, True, True),
])  # fmt: skip
def test_quota_usage(used, quota, nearly, full):
    assert (QuotaUsage(used, quota).nearly, QuotaUsage(used, quota).full) == (nearly, full)


def test_sizes_in_words():
    words = [size(n) for n in (0, 1, 1000, 1024, 1536, 150 * 2**20, 1001 * 2**20, 2**30 - 1, int(71.82 * 2**30), 5000 * 2**40)]
    said = ["0 bytes", "1 byte", "1000 bytes", "1 KiB", "1.5 KiB", "150 MiB", "1,001 MiB", "1 GiB", "71.8 GiB", "5,000 TiB"]
    assert words == said
