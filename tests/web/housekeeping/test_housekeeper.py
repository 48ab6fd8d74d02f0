"""The housekeeper's process: making room in a thread of its own holds up neither sealing nor the end."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import connection, transaction

from oppo_platform.housekeeping.management.commands import housekeeper
from oppo_platform.housekeeping.rounds import run_round
from oppo_platform.runs.models import Run
from oppo_platform.storage import purging
from oppo_platform.storage.models import Deletion, RunStorage
from oppo_platform.storage.trash import delete_run
from oppo_platform.storage.usage import measure
from oppo_platform.telemetry.models import HotPoints, ProducerMark
from tests.web.event_factories import end, tell_everything

BLOCKED_BY_US = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY(pg_blocking_pids(pid))"


class Holder:
    """Holds a run's row, in a session of its own, until `let_go`."""

    def __init__(self, run_id: int) -> None:
        self.session = connection.copy()
        self.session.set_autocommit(False)
        self._ask("SELECT count(*) FROM (SELECT id FROM runs_run WHERE id = %s FOR UPDATE) AS held", [run_id])

    def _ask(self, query, values=()):
        with self.session.cursor() as cursor:
            cursor.execute(query, values)
            return cursor.fetchone()[0]

    def blocks_somebody(self):
        return self._ask(BLOCKED_BY_US) > 0

    def let_go(self):
        self.session.rollback()
        self.session.close()


def until(condition, otherwise, within_s=30):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def named(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.fixture
def at_work(settings):
    """Starts the process' work in a thread; returns (the thread, what stops it)."""
    settings.OPPO_HOUSEKEEPING_S = 0.02
    stop, started = threading.Event(), []

    def work():
        try:
            housekeeper.work_until(stop)
        finally:
            connection.close()  # this thread's own; at the end of a process nobody needs to

    def start():
        thread = threading.Thread(target=work, name="housekeeper")
        thread.start()
        started.append(thread)
        return thread, stop

    yield start
    stop.set()
    for thread in [*started, *named("delivery"), *named("deletion")]:
        thread.join(timeout=30)
        assert not thread.is_alive()


def ended_run(world, worker, events, **changes):
    """(run, attempt id) of a run that told everything and has ended."""
    run, attempt_id = world.start(worker, **changes)
    tell_everything(worker, attempt_id, events)
    end(worker, attempt_id)
    return run, attempt_id


def test_compaction_continues_while_deletion_is_blocked(world, events, settings, tmp_path, at_work, monkeypatch):
    settings.OPPO_TRASH_DAYS, settings.OPPO_ARTIFACT_ROOT = 0, tmp_path.as_uri()
    monkeypatch.setattr(housekeeper, "STOP_TIMEOUT_S", 0.1)
    worker = world.worker()
    unwanted, _ = ended_run(world, worker, events)
    run_round()
    delete_run(unwanted.pk, "user:ada")
    holder = Holder(unwanted.pk)
    try:
        thread, stop = at_work()
        until(holder.blocks_somebody, "the deletion thread does not reach the locked run")
        _, attempt_id = ended_run(world, worker, events)
        until(lambda: not HotPoints.objects.filter(series__attempt=attempt_id).exists(), "nothing is sealed")
        assert ProducerMark.objects.get(attempt=attempt_id, producer="engine").sealed > 0
        assert holder.blocks_somebody(), "the deletion thread still waits"
        stop.set()
        thread.join(timeout=30)
        assert not thread.is_alive(), "the process does not wait for it either"
        assert named("deletion"), "which is in the middle of it"
    finally:
        holder.let_go()
    until(lambda: not named("deletion"), "it goes on when it can, and ends")
    assert Run.objects.get(pk=unwanted.pk).purged_at is not None


def test_a_deleted_run_goes_and_all_threads_end_with_the_process(world, events, settings, tmp_path, at_work):
    settings.OPPO_TRASH_DAYS, settings.OPPO_ARTIFACT_ROOT = 0, tmp_path.as_uri()
    run, _ = ended_run(world, world.worker(), events)
    delete_run(run.pk, "user:ada")
    thread, stop = at_work()
    until(lambda: Deletion.objects.filter(run=run, ended_at__isnull=False).exists(), "the run is not deleted")
    assert (len(named("delivery")), len(named("deletion"))) == (1, 1)
    stop.set()
    thread.join(timeout=30)
    assert (named("delivery"), named("deletion")) == ([], [])


def test_error_in_the_deletion_thread_ends_the_process(world, at_work, monkeypatch):
    told = []

    def fault():
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(housekeeper, "run_deletions", fault)
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append((args.thread.name, str(args.exc_value))))
    thread, _ = at_work()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert told == [("deletion", "the disk is gone")]


def test_measuring_a_run_that_is_being_deleted_leaves_no_row_behind(world, events, settings, tmp_path):
    settings.OPPO_TRASH_DAYS, settings.OPPO_ARTIFACT_ROOT = 0, tmp_path.as_uri()
    run, _ = ended_run(world, world.worker(), events)
    delete_run(run.pk, "user:ada")
    with transaction.atomic():
        measure(run.pk)  # it read the run before, and is not done
        purger = threading.Thread(target=lambda: (purging.purge(), connection.close()))
        purger.start()
        purger.join(timeout=30)
        assert not purger.is_alive(), "nobody waits for it"
        assert Run.objects.get(pk=run.pk).purged_at is not None
        assert Deletion.objects.get(run=run).ended_at is None
    purging.purge()
    assert Deletion.objects.get(run=run).ended_at is not None
    measure(run.pk)
    assert not RunStorage.objects.exists()
