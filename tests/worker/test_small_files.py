"""Small files that are empty or torn after a kill, a full disk or a power failure do not stop a worker."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest

from oppo_contract.events import LOCAL_RANK_SUFFIX
from oppo_contract.machine import write_private
from worker import folders
from worker.engine_process import kill_leftover
from worker.folders import AttemptFolder, EngineEnd, WorkerFolder
from worker.logs import LogTail
from worker.outbox import OutboxReader, OutboxWriter
from worker.outcomes import find_root_cause
from worker.redaction import Redactor

NOTHING_SECRET = Redactor({})
TORN = ["", "{", '{"epoch": 1}', "[]", "\0\0\0\0"]


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    """The folder of a finished attempt."""
    folder = WorkerFolder(tmp_path).attempt(17)
    folder.path.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("text", TORN)
def test_unreadable_claim_is_moved_aside(attempt: AttemptFolder, text: str) -> None:
    attempt.claim_file.write_text(text)
    assert attempt.unreported_attempt() is None
    assert attempt.saved_claim() is None
    assert not attempt.claim_file.exists()
    assert attempt.path.joinpath("claim.json.unreadable").read_text() == text


@pytest.mark.parametrize("text", ["", '{"stdout": ', '{"stdout": "x"}', "[]", "\0\0\0\0"])
def test_unreadable_offsets_restart_the_log(attempt: AttemptFolder, text: str) -> None:
    attempt.path.joinpath("tails.json").write_text(text)
    attempt.log_file("stdout").write_text("one\ntwo\n")
    LogTail(attempt, OutboxWriter(attempt.supervisor_events), NOTHING_SECRET).follow()
    told = OutboxReader(attempt.supervisor_events, "supervisor", NOTHING_SECRET).batch()
    assert [line.event.lines for line in told] == [["one", "two"]]  # type: ignore[union-attr]
    assert json.loads(attempt.path.joinpath("tails.json").read_text()) == {"stdout": 8}


@pytest.mark.parametrize("text", ["", "\0\0", "17 "])
def test_unreadable_session_is_ignored(attempt: AttemptFolder, text: str) -> None:
    attempt.session_file.write_text(text)
    kill_leftover(attempt)
    assert attempt.session_file.exists(), "an engine was started once, and no second one may be"


@pytest.mark.parametrize("text", TORN[:2])
def test_unreadable_end_is_ignored(attempt: AttemptFolder, text: str) -> None:
    attempt.end_file.write_text(text)
    assert attempt.engine_end() is None
    write_private(attempt.end_file, EngineEnd(exit_code=3).model_dump_json())
    assert attempt.engine_end() == EngineEnd(exit_code=3)


def test_unreadable_last_event_is_ignored(attempt: AttemptFolder) -> None:
    said = {"producer": "engine", "seq": 1, "time": 0, "kind": "finished", "outcome": "failed", "step": 3, "reason": "why"}
    for rank, line in enumerate(["\0\0\0\n", '{"kind": "surprise"}\n', json.dumps(said) + "\n"], start=1):
        attempt.path.joinpath(f"{attempt.engine_events.name}{LOCAL_RANK_SUFFIX}{rank}").write_text(line)
    cause = find_root_cause(None, attempt, NOTHING_SECRET)
    assert cause is not None
    assert cause.reason == "why"


@pytest.mark.parametrize("torn", [[b"\0\0\0\0"], [b"{half", b"{another"], [b"null"]])
def test_writer_and_reader_number_unreadable_lines_alike(tmp_path: Path, torn: list[bytes]) -> None:
    file = tmp_path / "own.jsonl"
    OutboxWriter(file).log("stdout", ["one"])
    file.write_bytes(file.read_bytes() + b"".join(line + b"\n" for line in torn))
    OutboxWriter(file).log("stdout", ["after"])
    lines = OutboxReader(file, "supervisor", NOTHING_SECRET).batch()
    assert [line.event.seq for line in lines] == list(range(1, len(torn) + 3))
    assert lines[-1].event.lines == ["after"]  # type: ignore[union-attr]


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    file = tmp_path / "small"
    write_private(file, "before")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fails == "fsync":
        monkeypatch.setattr(folders.os, "fsync", full)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4, limits[1]))
    try:
        with pytest.raises(OSError, match=r"No space|File too large"):
            write_private(file, "after all")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
