"""A restore puts everything back, believes nothing that may have changed since, and leaves the old database alone until then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from django.conf import settings as django_settings
from django.core.management import call_command
from django.db import connection

from oppo_platform.accounts.models import AuditEntry, LoginLink
from oppo_platform.accounts.services import create_login_link
from oppo_platform.accounts.team_secrets import secret_names
from oppo_platform.backup import BackupError, BackupRefused
from oppo_platform.backup.archive import new_archive, open_archive
from oppo_platform.backup.databases import connect_server
from oppo_platform.backup.keys import fingerprint as key_hash
from oppo_platform.backup.restore import check_migrations
from oppo_platform.cluster.models import Device
from oppo_platform.runs.models import Allocation, Attempt, Run
from tests.web.backup.backups import TARGET, Backups, databases, everything, save, url_of


def test_restored_rows_equal_the_originals(busy, backups: Backups) -> None:
    before = everything(backups.here)
    assert sum(map(len, before.values())) > 100
    done = backups.restored(backups.made().file, nothing_since=True)
    after = everything(TARGET)
    added = [row for row in after["accounts_auditentry"] if row not in before["accounts_auditentry"]]
    assert len(added) == 1
    assert "platform.restore" in added[0]
    for name in ("accounts_auditentry", "accounts_auditentry.id"):
        del before[name], after[name]
    assert after == before
    assert (done.kept, done.runs, done.attempts_ended, done.migrated) == ("", 3, 0, [])
    assert databases() == {TARGET}


def test_database_constraints_are_restored(busy, backups: Backups) -> None:
    backups.restored(backups.made().file, nothing_since=True)
    with psycopg.connect(url_of(TARGET), autocommit=True) as there:
        for forbidden in (
            "UPDATE accounts_auditentry SET action = 'x'",
            "UPDATE runs_transition SET reason = 'x'",
            "UPDATE runs_attempt SET epoch = 9",
            "UPDATE runs_run SET priority = 0",
            "DELETE FROM runs_project",
        ):
            with pytest.raises(psycopg.Error):
                there.execute(forbidden)


def test_live_attempts_end_at_the_backup(busy, backups: Backups) -> None:
    _, worker, run, attempt_id = busy
    save(worker, run, attempt_id, 5)
    made = backups.made()
    done = backups.restored(made.file)
    assert done.attempts_ended == 1
    with backups.looking_at():
        run, attempt = Run.objects.get(pk=run.pk), Attempt.objects.get(pk=attempt_id)
        assert (attempt.state, attempt.outcome) == ("fenced", "restored")
        assert run.state == "queued"
        assert run.reason.startswith("The platform was restored from its backup of 20")
        assert run.reason.endswith(" UTC. Resumes from step 5.")
        assert attempt.ended_at.isoformat() == made.manifest["made_at"], "nothing later is known, or charged"
        assert set(Allocation.objects.filter(attempt=attempt).values_list("released_at", flat=True)) == {attempt.ended_at}
        assert not Allocation.objects.filter(released_at=None).exists()
        assert run.transitions.latest("id").actor == "restore"
        assert AuditEntry.objects.latest("id").details["attempts_ended"] == 1


def test_the_platform_works_on_and_gives_no_number_twice(busy, backups: Backups, events) -> None:
    world, worker, run, attempt_id = busy
    file = backups.made().file
    newest, cursor = Attempt.objects.latest("id").pk, Run.objects.get(pk=run.pk).cursor
    backups.restored(file)
    with backups.looking_at():
        world.clock.advance(100 * 24 * 3600)
        late = worker.attempt(attempt_id, "heartbeat", {"epoch": 1, "running": True})
        assert (late.status_code, late.json()["reason"]) == (409, "lease_lost")
        late = worker.send_events(attempt_id, [events.step(26, 7, m=1.0)])  # its history is taken, as after any fence
        assert late.status_code == 200
        assert Run.objects.get(pk=run.pk).cursor > cursor + 1_000_000, "open pages see that it is newer than what they had"
        # The node has begun something since that the platform knows nothing of, and its device is not given away meanwhile.
        orders = worker.heartbeat(attempts=[(newest + 1, 2)])
        assert orders["stop"] == [{"attempt_id": newest + 1, "epoch": 2}]
        assert Device.objects.get().state == "unknown"
        assert not world.cycle().placed
        worker.heartbeat()
        assert Device.objects.get().state == "ready"
        assert world.cycle().placed == 1
        begun = Attempt.objects.latest("id")
        assert begun.pk > newest + 1_000_000
        assert worker.claim(begun.pk, begun.epoch).status_code == 200
        assert world.submit().pk > 10_000


@pytest.mark.full
def test_one_time_links_are_void_and_tokens_valid_after_a_restore(busy, backups: Backups) -> None:
    world, worker, _, _ = busy
    create_login_link(world.people["ada"])
    browser = world.login("ada")
    assert browser.get("/runs").status_code == 200
    backups.restored(backups.made().file)
    with backups.looking_at():
        assert not LoginLink.objects.filter(used_at=None).exists()
        told = {"name": "late", "hostname": "host", "cpus": 2, "memory_bytes": 1}
        assert worker.post("join", told, world.join_token).status_code == 401
        assert browser.get("/runs").status_code == 302, "sessions of then are over"
        worker.heartbeat()  # the node's token lasts
        assert secret_names(world.team.pk) == ["HUB_TOKEN"]


def test_a_database_with_runs_is_replaced_only_when_told_and_kept(busy, backups: Backups) -> None:
    world, *_ = busy
    file = backups.made().file
    backups.restored(file)
    with backups.looking_at():
        world.submit()
    before = everything(TARGET)
    with pytest.raises(BackupRefused, match=r"put_back has 4 runs, and nothing was changed. With --replace"):
        backups.restored(file)
    assert (everything(TARGET), databases()) == (before, {TARGET})
    done = backups.restored(file, replace=True)
    assert done.kept.startswith(f"{TARGET}_before_20")
    assert everything(done.kept) == before
    assert len(everything(TARGET)["runs_run"]) == 3
    with connect_server(url_of(TARGET)) as server:
        with pytest.raises(BackupRefused, match="is no database that a restore has put aside"):
            server.drop_kept("postgres")
        assert server.kept() == [done.kept]
        second = datetime.strptime(done.kept[-14:] + "Z", "%Y%m%d%H%M%S%z")
        assert server.stamp_at(second) == f"{second + timedelta(seconds=1):%Y%m%d%H%M%S}", "two restores in one second"
        aside = server.swap_kept(done.kept, datetime(2099, 1, 1, tzinfo=UTC))
        assert everything(TARGET) == before, "a restore can be undone"
        assert aside == f"{TARGET}_before_20990101000000"
        server.drop_kept(aside)
    assert databases() == {TARGET}


def test_a_database_in_use_is_left_alone(busy, backups: Backups) -> None:
    file = backups.made().file
    backups.restored(file)
    with psycopg.connect(url_of(TARGET), application_name="oppo web"), pytest.raises(BackupRefused, match=r"1 × oppo web from"):
        backups.restored(file, replace=True)
    assert databases() == {TARGET}


@pytest.mark.full
def test_late_connection_aborts_the_swap_without_changes(busy, backups: Backups) -> None:
    file = backups.made().file
    backups.restored(file)
    before, late = everything(TARGET), []

    def tell(line: str) -> None:
        if line.startswith("Bringing"):
            late.append(psycopg.connect(url_of(TARGET), application_name="early bird"))

    backups.told = type("Told", (list,), {"append": staticmethod(tell)})()
    with pytest.raises(BackupRefused, match="early bird"):
        backups.restored(file, replace=True)
    late[0].close()
    assert (everything(TARGET), databases()) == (before, {TARGET})


def test_only_one_restore_at_a_time(busy, backups: Backups) -> None:
    with connect_server(url_of(TARGET)), pytest.raises(BackupRefused, match="Another restore"), connect_server(url_of("other")):
        pass


@pytest.mark.parametrize("member", ["database.dump", "checkpoints.json", "manifest.json", "manifest.sha256"])
def test_a_damaged_backup_is_refused_before_anything_changes(busy, backups: Backups, member: str) -> None:
    file = backups.made().file
    with open_archive(file, print) as archive:
        offset, size = archive.places[member]
    content = bytearray(file.read_bytes())
    content[offset + size // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(BackupRefused, match=r"is damaged|no backup, or a damaged one"):
        backups.restored(file)
    assert databases() == set()


@pytest.mark.full
def test_a_dump_that_does_not_load_changes_nothing(busy, backups: Backups) -> None:
    made = backups.made()
    for dump, words in ((b"not a dump", "pg_restore ended with status 1"), (None, "is not what was backed up")):
        file = backups.folder / f"odd-{dump is None}.tar"
        with open_archive(made.file, print) as archive, new_archive(file) as odd:
            odd.add("database.dump", dump or archive.read("database.dump"))
            odd.add("checkpoints.json", archive.read("checkpoints.json"))
            rows = {**archive.manifest["rows"], "public.runs_run": 99}
            odd.finish({**archive.manifest, "rows": rows})
        with pytest.raises(BackupError, match=words):
            backups.restored(file)
        assert databases() == set()


def test_a_killed_restore_leaves_the_old_database_and_the_next_one_works(busy, backups: Backups) -> None:
    file = backups.made().file
    backups.restored(file)
    before = everything(TARGET)
    environ = {**os.environ, "DATABASE_URL": url_of(TARGET), "OPPO_HOME": str(backups.home)}
    command = [sys.executable, "-m", "oppo_cli", "restore", "--replace", str(file)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 60
        while not any("_restoring_" in name for name in databases()):
            assert process.poll() is None, process.stdout.read()  # type: ignore[union-attr]
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGKILL)
    assert everything(TARGET) == before
    assert any("_restoring_" in name for name in databases())
    done = backups.restored(file, replace=True)
    assert databases() == {TARGET, done.kept}


def test_a_backup_of_before_a_migration_is_brought_up_to_date(busy, backups: Backups) -> None:
    world, worker, run, _ = busy
    backups.restored(backups.made().file, nothing_since=True)
    with backups.looking_at():
        call_command("migrate", "runs", "0009", verbosity=0)
        with connection.cursor() as cursor, pytest.raises(Exception, match="forked_run"):
            cursor.execute("SELECT forked_run FROM runs_run")
    old = backups.made(TARGET)
    assert old.manifest["migrations"]["runs"][-1] == "0009_saved_views"
    done = backups.restored(old.file, replace=True)
    assert "runs.0010_forks" in done.migrated
    with backups.looking_at():
        assert Run.objects.get(pk=run.pk).forked_run is None
        assert Run.objects.count() == 3
        world.clock.advance(100 * 24 * 3600)
        worker.heartbeat()
        assert world.cycle().placed == 1
        assert world.login("ada").get(f"/runs/{run.pk}").status_code == 200


def test_a_backup_newer_than_the_code_is_refused_in_words(backups: Backups) -> None:
    manifest = {"platform_version": "7.0", "migrations": {"runs": ["0001_initial", "0099_future"], "fresh": ["0001_initial"]}}
    with pytest.raises(BackupRefused, match=r"newer than this installation \(OPPO 7.0; unknown here: runs.0099_future, fresh."):
        check_migrations(manifest)
    manifest = backups.made().manifest
    check_migrations(manifest)
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO django_migrations (app, name, applied) VALUES ('runs', '0099_future', now())")
    try:
        with pytest.raises(BackupRefused, match=r"unknown here: runs.0099_future"):
            backups.restored(backups.made().file)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM django_migrations WHERE name = '0099_future'")
    assert databases() == set()


def test_keys_that_cannot_be_put_back_are_told_and_those_that_are_cut_are_refused_first(busy, backups: Backups, settings) -> None:
    made = backups.made(with_keys=True)
    cut = backups.folder / "cut.tar"
    with open_archive(made.file, print) as archive, new_archive(cut) as odd:
        for name in archive.manifest.pop("members"):
            odd.add(name, b'{"secret_key": "short"}' if name == "keys.json" else archive.read(name))
        odd.finish(archive.manifest)
    with pytest.raises(BackupError, match="keys in the backup"):
        backups.restored(cut)
    settings.OPPO_HOME, settings.SECRET_KEY = backups.home, "another key of another installation, long enough"
    (backups.home / "secret_key").mkdir()  # nothing can be written there
    done = backups.restored(made.file)
    assert "THE KEYS ARE NOT PUT BACK" in done.keys[0]
    assert databases() == {TARGET}


@pytest.mark.full
def test_keys_come_back_when_they_were_put_in_and_are_asked_for_when_not(busy, backups: Backups, settings) -> None:
    kept = Path(django_settings.OPPO_HOME)
    with_keys, without = backups.made(with_keys=True), backups.made()
    assert (kept / "secrets_keys").read_text().strip().encode() not in without.file.read_bytes()
    settings.OPPO_HOME, settings.SECRET_KEY = backups.home, "another key of another installation, long enough"
    done = backups.restored(without.file)
    assert "the one of the backup" in done.keys[0]
    assert done.undecryptable == ["secret HUB_TOKEN of team Letters"]
    had = (backups.home / "secrets_keys").read_text()
    done = backups.restored(with_keys.file, replace=True)
    assert done.undecryptable == []
    assert [words.partition(";")[0] for words in done.keys] == ["secret_key is put back.", "secrets_keys is put back"]
    assert key_hash((backups.home / "secret_key").read_text()) == with_keys.manifest["keys"]["secret_key"]
    assert (backups.home / "secrets_keys").read_text().split() == [*(kept / "secrets_keys").read_text().split(), *had.split()]
    assert [path.read_text() for path in backups.home.glob("secrets_keys.before-*")] == [had]
    assert {oct(path.stat().st_mode & 0o777) for path in backups.home.glob("secret*")} == {"0o600"}
