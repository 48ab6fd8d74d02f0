"""A backup is as of one instant, whole or not there, and says what is in it and what is not."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from oppo_cli.main import main
from oppo_platform.backup import BackupError, BackupRefused, pg_tools
from oppo_platform.backup.archive import PARTIAL, new_archive, open_archive
from oppo_platform.backup.create import backup_file
from oppo_platform.runs.models import Run
from oppo_platform.telemetry.models import ProducerMark
from tests.web.backup.backups import Backups
from tests.web.event_factories import tell_everything

CONTENT = {"database.dump": b"d" * 5000, "checkpoints.json": b"[]", "checkpoints/1/0": b""}
# Writes half a member, says so, and waits to be killed.
HALF = """
import sys
from pathlib import Path
from oppo_platform.backup.archive import new_archive
with new_archive(Path(sys.argv[1])) as archive, archive.member("database.dump") as write:
    write(b"x" * 100000)
    print("half", flush=True)
    sys.stdin.read()
"""
# No file may grow beyond that, as on a disk that is full.
FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
from oppo_cli.main import main
main(["backup", sys.argv[1]])
"""


def a_backup(file: Path) -> Path:
    with new_archive(file) as archive:
        for name, content in CONTENT.items():
            archive.add(name, content)
        archive.finish({"rows": {"public.runs_run": 3}, "platform_version": "0"})
    return file


def read(file: Path) -> dict[str, bytes]:
    with open_archive(file, lambda line: None) as archive:
        assert archive.manifest["rows"] == {"public.runs_run": 3}
        return {name: archive.read(name) for name in archive.manifest["members"]}


def test_backup_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    file = a_backup(tmp_path / "b.tar")
    assert read(file) == CONTENT
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["b.tar"]
    with tarfile.open(file) as tar:  # any tar program can look into it
        assert [told.name for told in tar][-2:] == ["manifest.json", "manifest.sha256"]
    with pytest.raises(BackupRefused, match="there already"):
        a_backup(file)
    assert read(file) == CONTENT


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_byte_is_noticed_wherever_it_counts(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "b.tar"
    whole = file.read_bytes() if file.exists() else a_backup(file).read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    other = tmp_path / "changed.tar"
    other.write_bytes(changed)
    try:
        assert read(other) == CONTENT  # padding, which nobody reads
    except BackupRefused:
        return
    with tarfile.open(file) as tar:
        assert not any(told.offset_data <= place < told.offset_data + told.size for told in tar)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1))
@example(0.0)
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, share: float) -> None:
    file = tmp_path / "b.tar"
    whole = file.read_bytes() if file.exists() else a_backup(file).read_bytes()
    with tarfile.open(file) as tar:
        last = tar.getmembers()[-1]
    other = tmp_path / "cut.tar"
    other.write_bytes(whole[: int(share * (last.offset_data + last.size - 1))])
    with pytest.raises(BackupRefused):
        read(other)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["database.dump", "database.dump", "checkpoints.json", "manifest.json", "manifest.sha256"], "twice"),
        (["checkpoints.json", "manifest.json", "manifest.sha256"], "is missing"),
        (["database.dump", "checkpoints.json", "more", "manifest.json", "manifest.sha256"], "more is not what was written"),
    ],
)
def test_members_are_those_of_the_manifest_each_once(tmp_path: Path, names: list[str], words: str) -> None:
    with tarfile.open(a_backup(tmp_path / "b.tar")) as tar, tarfile.open(tmp_path / "odd.tar", "w") as odd:
        held = {told.name: tar.extractfile(told).read() for told in tar}  # type: ignore[union-attr]
        for name in [*names[:1], "checkpoints/1/0", *names[1:]]:
            told = tarfile.TarInfo(name)
            told.size = len(held.get(name, b""))
            odd.addfile(told, io.BytesIO(held.get(name, b"")))
    with pytest.raises(BackupRefused, match=words):
        read(tmp_path / "odd.tar")


def test_another_format_is_refused_in_words(tmp_path: Path) -> None:
    with new_archive(tmp_path / "b.tar") as archive:
        archive.add("database.dump", b"")
        archive.finish({"format": 2, "platform_version": "9.9"})
    with pytest.raises(BackupRefused, match=r"format 2 \(of OPPO 9.9\), and this version reads format 1"):
        read(tmp_path / "b.tar")


@pytest.mark.parametrize("manifest", [{"format": None}, {"members": []}, {"members": None}])
def test_a_manifest_that_was_written_by_hand_is_refused_in_words(tmp_path: Path, manifest: dict[str, object]) -> None:
    with new_archive(tmp_path / "b.tar") as archive:
        archive.add("database.dump", b"")
        text = json.dumps({"format": 1, "members": dict(archive.members), **manifest}).encode()
        archive.add("manifest.json", text)
        archive.add("manifest.sha256", hashlib.sha256(text).hexdigest().encode())
    with pytest.raises(BackupRefused, match=r"format None|lists no members"):
        read(tmp_path / "b.tar")


def test_checking_says_what_a_backup_lacks(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["restore", "--check", str(a_backup(tmp_path / "b.tar"))])
    assert (done.exit_code, "lacks made_at, postgres" in done.output) == (2, True), done.output


def test_a_killed_backup_leaves_nothing_that_looks_whole_and_the_next_one_clears_it_away(tmp_path: Path) -> None:
    file = tmp_path / "b.tar"
    with subprocess.Popen([sys.executable, "-c", HALF, str(file)], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as half:
        assert half.stdout is not None
        assert half.stdout.readline() == b"half\n"
        a_backup(tmp_path / "other.tar")  # beside it
        assert len(list(tmp_path.glob(f".*{PARTIAL}"))) == 1, "one that is being written is nobody's leftover"
        half.send_signal(signal.SIGKILL)
    assert not file.exists()
    (left,) = tmp_path.glob(f".*{PARTIAL}")
    with pytest.raises(BackupRefused, match="cut off"):
        read(left)
    a_backup(file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar", "other.tar"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="No space"), new_archive(tmp_path / "b.tar"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BackupRefused, match="cannot be written to"), new_archive(tmp_path / "away" / "b.tar"):
        pass


@pytest.fixture
def backups(world, tmp_path):
    made = Backups(tmp_path)
    yield made
    made.clear()


def test_a_full_disk_is_told_and_nothing_is_left(backups: Backups, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    from tests.web.backup.backups import url_of

    environ = {**os.environ, "DATABASE_URL": url_of(backups.here), "OPPO_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", FULL, str(out)], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, list(out.iterdir())) == (1, [])
    assert "could not be written" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_manifest_says_what_is_in_it(world, backups: Backups, events) -> None:
    world.worker()
    world.submit()
    manifest = backups.made().manifest
    assert manifest["rows"]["public.runs_run"] == 1
    assert manifest["migrations"]["runs"][0] == "0001_initial"
    assert manifest["keys"]["included"] is False
    assert manifest["checkpoints"] == {"registered": 0, "here": 0, "included": 0, "bytes": 0}


def test_no_password_stands_on_a_command_line() -> None:
    where, environ = pg_tools.connection_args("postgresql://oppo:s3cret@db.example/oppo?sslmode=require")
    assert "s3cret" not in where
    assert environ["PGPASSWORD"] == "s3cret"
    assert "dbname=oppo" in where
    assert "sslmode=require" in where


def test_programs_older_than_the_server_are_refused_with_what_to_install() -> None:
    assert pg_tools.find_program("pg_dump", 18).major >= 18
    with pytest.raises(BackupRefused, match="postgresql-client-99"):
        pg_tools.find_program("pg_dump", 99)


def test_a_folder_gets_a_file_with_the_time_in_its_name(tmp_path: Path, clock) -> None:
    assert backup_file(tmp_path, clock.now()) == tmp_path / "oppo-backup-20261101T120000Z.tar"
    assert backup_file(tmp_path / "b.tar", clock.now()) == tmp_path / "b.tar"


@pytest.mark.full
def test_while_events_are_written_a_backup_holds_each_batch_whole(world, backups: Backups, events) -> None:
    worker = world.worker()
    run, attempt_id = world.start(worker)
    tell_everything(worker, attempt_id, events, steps=1)
    first = ProducerMark.objects.get(attempt=attempt_id, producer="engine").high_water
    stop, failed = threading.Event(), []

    def write_on() -> None:
        from django.db import connection

        number = 1
        while not stop.is_set():
            seq, step = first + 2 * number - 1, 1 + number
            reply = worker.send_events(attempt_id, [events.step(seq, step, m=1.0), events.step(seq + 1, step, m=2.0)])
            if reply.status_code != 200:
                failed.append(reply.content)
            number += 1
        connection.close()

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        files = [backups.made().file for _ in range(3)]
    finally:
        stop.set()
        writer.join()
    assert not failed
    seen = []
    for file in files:
        backups.restored(file, replace=True, nothing_since=True)  # every reference is checked by PostgreSQL as it is loaded
        with backups.looking_at():
            mark, there = ProducerMark.objects.get(attempt=attempt_id, producer="engine"), Run.objects.get(pk=run.pk)
            batches = (mark.high_water - first) // 2
            assert mark.high_water == first + 2 * batches, "half a batch"
            assert there.step == 1 + batches
            seen.append((batches, there.cursor))
    assert seen == sorted(seen)
    assert len({cursor - batches for batches, cursor in seen}) == 1, "the cursor moves once a batch"
