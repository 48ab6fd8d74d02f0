"""Checkpoints in backups: their files come back whole, to their own places, and what is lost is told."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection

from oppo_contract.checkpoint_pins import pins_locked
from oppo_platform.backup import BackupError
from oppo_platform.backup.archive import new_archive, open_archive
from oppo_platform.backup.checkpoint_files import contained
from oppo_platform.backup.post_restore import Missing
from oppo_platform.runs.lifecycle import resume_run
from oppo_platform.runs.models import Checkpoint, Run
from tests.web.backup.backups import FILES, Backups, save
from tests.web.event_factories import end


@pytest.mark.full
def test_checkpoints_are_there_or_listed_as_missing(busy, backups: Backups) -> None:
    _, worker, run, attempt_id = busy
    first, second = save(worker, run, attempt_id, 2), save(worker, run, attempt_id, 4)
    file = backups.made().file
    (second / "manifest.json").unlink()
    lost = f"run {run.pk} demo, step 4: {second.as_uri()} (its next attempt would begin here)"
    assert backups.restored(file).missing == Missing([lost], 0, 0)
    first.parent.parent.rename(backups.folder / "moved")  # the run's whole folder: here it was, so it is not elsewhere
    done = backups.restored(file, replace=True)
    assert (len(done.missing.lost), done.missing.lost[1], done.missing.elsewhere) == (2, lost, 0)
    first.parent.mkdir(parents=True)
    done = backups.restored(backups.made().file, replace=True)  # they are gone when it is made: one of them is still waited for
    assert done.missing == Missing([lost], 1, 0)


def test_files_of_checkpoints_come_back_whole(busy, backups: Backups) -> None:
    _, worker, run, attempt_id = busy
    first, second = save(worker, run, attempt_id, 2), save(worker, run, attempt_id, 4)
    made = backups.made(with_checkpoints=True)
    assert made.manifest["checkpoints"] == {"registered": 2, "here": 2, "included": 2, "bytes": 140_006}
    first.parent.parent.rename(backups.folder / "moved")
    save_again = backups.folder / "moved" / "checkpoints" / second.name
    second.parent.mkdir(parents=True)
    save_again.rename(second)
    (second / "state.json").write_bytes(b"{}")
    done = backups.restored(made.file)
    assert (done.checkpoints_put_back, done.missing) == (1, Missing([], 0, 0))
    for folder in (first, second):
        assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert sorted(path.name for path in first.parent.iterdir()) == [first.name, second.name]


def test_backup_contains_the_resume_checkpoint_of_a_run_that_deletes_checkpoints(busy, backups: Backups) -> None:
    _, worker, run, attempt_id = busy
    stop = threading.Event()

    def save_on() -> None:
        try:
            kept = save(worker, run, attempt_id, 2)
            for step in itertools.count(4, 2):
                if stop.is_set():
                    return
                newer = save(worker, run, attempt_id, step)
                with pins_locked(kept.parent.parent):  # as the engine takes its older ones away
                    shutil.rmtree(kept)
                kept = newer
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save_on)
        try:
            while Checkpoint.objects.filter(run=run).count() < 3:
                assert not saving.done(), saving.result()
                time.sleep(0.01)
            files = [backups.made(with_checkpoints=True).file for _ in range(4)]
        finally:
            stop.set()
        saving.result()
    steps = []
    for file in files:
        with open_archive(file, print) as archive:
            newest = json.loads(archive.read("checkpoints.json"))[-1]
            assert "members" in newest, newest
            assert archive.read(newest["members"]["state.json"]) == FILES["state.json"]
            steps.append(newest["step"])
    assert steps[-1] > steps[0], "it went on meanwhile"


def test_a_run_whose_folder_cannot_be_locked_is_backed_up_all_the_same(busy, backups: Backups) -> None:
    _, worker, run, attempt_id = busy
    folder = save(worker, run, attempt_id, 2)
    (folder.parent.parent / "spared" / "lock").mkdir(
        parents=True
    )  # nobody can open it, as on a file system that may only be read
    assert backups.made(with_checkpoints=True).manifest["checkpoints"]["included"] == 1


@pytest.mark.parametrize("path", ["../../../escaped", "/tmp/escaped", "a/../../escaped", "", "a\0b"])
def test_a_path_of_a_checkpoint_stays_in_it(path: str) -> None:
    with pytest.raises(BackupError, match="is no file of a checkpoint"):
        contained(path)


@pytest.mark.full
def test_no_name_in_a_backup_leads_out_of_its_checkpoint(busy, backups: Backups) -> None:
    _, worker, run, attempt_id = busy
    folder = save(worker, run, attempt_id, 2)
    made = backups.made(with_checkpoints=True)
    folder.rename(backups.folder / "moved")
    evil = backups.folder / "evil.tar"
    with open_archive(made.file, print) as archive, new_archive(evil) as odd:
        listed = json.loads(archive.read("checkpoints.json"))
        listed[0]["members"]["a/../../escaped"] = listed[0]["members"].pop("state.json")
        for name in archive.manifest["members"]:
            odd.add(name, json.dumps(listed).encode() if name == "checkpoints.json" else archive.read(name))
        odd.finish(archive.manifest)
    done = backups.restored(evil)
    assert done.checkpoints_put_back == 0
    assert len(done.missing.lost) == 1
    assert any("is no file of a checkpoint" in line for line in backups.told)
    assert not [found for found in backups.folder.rglob("*") if "escaped" in found.name]
    assert not folder.exists()


@pytest.mark.parametrize("ended", [False, True])
def test_a_restore_under_another_root_moves_checkpoints_there(busy, backups: Backups, settings, ended: bool) -> None:
    _, worker, run, attempt_id = busy
    saved = save(worker, run, attempt_id, 4)
    if ended:
        end(worker, attempt_id)
    file = backups.made(with_checkpoints=True).file
    old, settings.OPPO_ARTIFACT_ROOT = settings.OPPO_ARTIFACT_ROOT, (backups.folder / "elsewhere").as_uri()
    done = backups.restored(file)
    assert (done.checkpoints_put_back, done.held, done.missing.lost) == (1, [], [])
    assert f"Its checkpoints were in {old}; here they belong in {settings.OPPO_ARTIFACT_ROOT}." in backups.told
    moved = backups.folder / "elsewhere" / "runs" / str(run.pk) / "checkpoints" / saved.name
    assert {name: (moved / name).read_bytes() for name in FILES} == FILES
    with backups.looking_at(), connection.cursor() as cursor:
        assert Checkpoint.objects.get(run=run).url == moved.as_uri()
        cursor.execute("SELECT tgenabled FROM pg_trigger WHERE tgname = 'oppo_fence_checkpoint'")
        assert cursor.fetchall() == [("O",)], "enabled again"


def test_runs_whose_checkpoint_is_not_here_are_held_and_resume_when_it_is(busy, backups: Backups, settings) -> None:
    _, worker, run, attempt_id = busy
    saved = save(worker, run, attempt_id, 4)
    file = backups.made().file
    settings.OPPO_ARTIFACT_ROOT = (backups.folder / "elsewhere").as_uri()
    moved = backups.folder / "elsewhere" / "runs" / str(run.pk) / "checkpoints" / saved.name
    moved.parent.mkdir(parents=True)
    done = backups.restored(file)
    assert done.held == [f"run {run.pk} demo, step 4: {moved.as_uri()}"]
    with backups.looking_at():
        held = Run.objects.get(pk=run.pk)
        assert held.state == "paused"
        assert held.reason.startswith(
            f"Held by the restore: the files of its checkpoint of step 4 are missing, {moved.as_uri()}."
        )
        shutil.copytree(saved, moved)
        resume_run(run.pk, "user:ada")
        assert Run.objects.get(pk=run.pk).state == "queued"


def test_a_run_whose_worker_has_saved_a_newer_checkpoint_is_not_held(busy, backups: Backups) -> None:
    """The worker registers it when its attempt is stopped; the run resumes from there."""
    _, worker, run, attempt_id = busy
    first = save(worker, run, attempt_id, 4)
    file = backups.made().file
    save(worker, run, attempt_id, 6)
    shutil.rmtree(first)
    done = backups.restored(file)
    assert done.held == []
    with backups.looking_at():
        assert Run.objects.get(pk=run.pk).state == "queued"
