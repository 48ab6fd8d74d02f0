"""Disks that run full: their node gets nothing new and says why; the platform's own: no run is taken. Both end by themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from oppo_platform.cluster import disks
from oppo_platform.cluster.disks import is_low
from oppo_platform.cluster.models import Disk
from oppo_platform.storage import database_disk
from oppo_platform.storage.database_disk import check_database_disk
from tests.web.event_factories import run_round

GIB = 2**30


def beat(worker, **free):
    """A heartbeat with so many bytes free on each disk, of 100 GiB."""
    told = [{"what": what, "path": f"/{what}", "free_bytes": count, "total_bytes": 100 * GIB} for what, count in free.items()]
    report = {"devices": [{"index": 0, "kind": "cpu", "model": "m", "memory_bytes": 1}], "attempts": [], "disks": told}
    reply = worker.post("heartbeat", report, worker.token)
    assert reply.status_code == 200, reply.content


@pytest.fixture
def small(settings):
    assert settings.OPPO_LOW_DISK_BYTES == GIB, "by default"
    settings.OPPO_NODE_FRESH_S = settings.OPPO_LEASE_S = 1e9


@pytest.mark.parametrize("what", ["artifacts", "outbox"])
def test_a_node_that_runs_full_gets_nothing_new_until_there_is_room(world, small, what):
    worker = world.worker()
    beat(worker, artifacts=50 * GIB, outbox=50 * GIB)
    _, attempt_id = world.start(worker)
    beat(worker, **{"artifacts": 50 * GIB, "outbox": 50 * GIB, what: GIB - 1})
    assert worker.attempt(attempt_id, "heartbeat", {"epoch": 1, "running": True}).json()["signal"] is None  # it goes on
    assert worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": "succeeded", "reason": "done"}).status_code == 200
    run = world.submit(name="next")
    world.cycle()
    run.refresh_from_db()
    assert (run.state, run.reason) == ("queued", "Node node1 is suitable, but low on disk.")
    ada = world.login("ada")
    assert "low on disk" in ada.get("/queue").content.decode()
    words = {"artifacts": "1 GiB left for checkpoints", "outbox": "1 GiB left for events"}[what]
    assert words in ada.get("/sharing").content.decode()
    beat(worker, **{what: int(1.05 * GIB)})  # not enough to come back
    world.cycle()
    run.refresh_from_db()
    assert run.state == "queued"
    beat(worker, **{what: int(1.2 * GIB)})
    world.cycle()
    run.refresh_from_db()
    assert run.state == "allocated"


def test_others_go_on_and_the_reason_names_the_one_that_is_left_out(world, small):
    full, fine = world.worker("full"), world.worker("fine")
    beat(full, artifacts=0)
    runs = [world.submit(name=f"r{n}") for n in range(2)]
    world.cycle()
    for run in runs:
        run.refresh_from_db()
    assert [run.state for run in runs] == ["allocated", "queued"]
    assert runs[0].attempts.get().node.name == "fine" == fine.name
    assert runs[1].reason.endswith("Node full accepts no new runs: low on disk.")


def test_free_space_is_stored_on_change_and_expires(world, small, django_assert_num_queries):
    worker = world.worker()
    beat(worker, artifacts=50 * GIB)
    beat(worker, artifacts=50 * GIB - 1000)
    assert Disk.objects.get().free_bytes == 50 * GIB
    beat(worker, artifacts=40 * GIB)
    assert Disk.objects.get().free_bytes == 40 * GIB
    beat(worker, artifacts=0)
    assert disks.describe_low_disks()
    world.clock.advance(disks.BELIEVED_S + 1)  # it stopped telling, as an older worker does
    assert disks.describe_low_disks() == {}


@hypothesis(deadline=None)
@given(free=st.lists(st.integers(0, 3 * GIB), max_size=30))
def test_a_disk_at_the_limit_does_not_come_and_go(free):
    """Between the limit and a tenth above it nothing changes."""
    low = False
    for count in free:
        was, low = low, is_low(count, was=low)
        assert low or count >= GIB
        assert low == was or count < GIB or count >= 1.1 * GIB


def test_submission_is_refused_while_the_database_disk_is_low(world, small, settings, make_spec, monkeypatch):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    ada = world.login("ada")

    def submit():
        return ada.post("/api/v1/runs", {"spec": make_spec()}, content_type="application/json")

    monkeypatch.setattr(database_disk, "free_bytes", lambda: GIB // 2)
    run_round()
    reply = submit()
    assert reply.status_code == 507
    assert reply.json()["detail"].startswith("The platform's database has 512 MiB of disk left: no new runs are accepted")
    assert "512 MiB of disk left" in world.login("vic").get("/runs").content.decode()
    assert worker.attempt(attempt_id, "heartbeat", {"epoch": 1, "running": True}).status_code == 200
    line = {"kind": "log", "producer": "supervisor", "seq": 1, "time": 1.0, "stream": "stdout", "lines": ["stored"]}
    assert worker.send_events(attempt_id, [line], "supervisor").status_code == 200
    monkeypatch.setattr(database_disk, "free_bytes", lambda: 2 * GIB)
    run_round()
    assert submit().status_code == 507  # it looks every ten seconds
    world.clock.advance(11)
    run_round()
    assert submit().status_code == 201
    run.refresh_from_db()
    assert run.state == "running"


def test_free_bytes_of_the_database_disk_and_its_limit(world, settings, tmp_path):
    assert database_disk.free_bytes() is None or database_disk.free_bytes() > 0  # a server of this machine tells its folder
    settings.OPPO_DATABASE_FOLDER = str(tmp_path)
    on_disk = database_disk.free_bytes()
    assert on_disk > 0
    settings.OPPO_DATABASE_MOST_BYTES = 1
    assert database_disk.free_bytes() == 0
    settings.OPPO_DATABASE_FOLDER, settings.OPPO_DATABASE_MOST_BYTES = str(tmp_path / "gone"), 0
    check_database_disk()
    assert database_disk.low_database() == ""
