"""The outbox and the log tail: order, torn lines, restarts, limits."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_contract.wire import MAX_BATCH_BYTES, EventBatch
from worker.folders import AttemptFolder
from worker.logs import MAX_LINES_PER_ROUND, LogTail, last_lines
from worker.outbox import OutboxReader, OutboxWriter
from worker.redaction import Redactor

NOTHING_SECRET = Redactor({})


def event(seq: int, size: int = 1) -> bytes:
    return json.dumps(
        {"producer": "engine", "seq": seq, "time": 1.0, "kind": "log", "stream": "stdout", "lines": ["x" * size]}
    ).encode()


@given(cuts=st.lists(st.integers(1, 400), max_size=60), acknowledged=st.lists(st.integers(0, 12), max_size=12))
def test_events_are_read_once_and_in_order_for_any_writes(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], acknowledged: list[int]
) -> None:
    file = tmp_path_factory.mktemp("outbox") / "events.jsonl"
    content = b"".join(event(seq) + b"\n" for seq in range(1, 11))
    reader = OutboxReader(file, "engine", NOTHING_SECRET)
    taken: list[int] = []
    position = 0
    for cut in [*cuts, len(content)]:
        with file.open("ab") as out:
            out.write(content[position : position + cut])
        position += cut
        lines = reader.batch()
        high_water = acknowledged.pop() if acknowledged else 0
        assert [line.event.seq for line in lines] == list(range(len(taken) + 1, len(taken) + 1 + len(lines)))
        taken += [done.seq for done in reader.acknowledge(min(high_water, len(taken) + len(lines)))]
    taken += [done.seq for line in [reader.batch()] if line for done in reader.acknowledge(line[-1].event.seq)]
    assert taken == list(range(1, 11))


def test_a_batch_stays_within_both_limits(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"".join(event(seq, 400_000) + b"\n" for seq in range(1, 31)))
    reader, sizes, seqs = OutboxReader(file, "engine", NOTHING_SECRET), [], []
    while lines := reader.batch():
        body = reader.body(lines)
        EventBatch.model_validate_json(body)
        sizes.append(len(body))
        seqs += [done.seq for done in reader.acknowledge(lines[-1].event.seq)]
    assert max(sizes) <= MAX_BATCH_BYTES
    assert seqs == list(range(1, 31))
    assert len(OutboxReader(file, "engine", NOTHING_SECRET).batch(max_events=3)) == 3


def test_rewinding_finds_an_older_event(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"".join(event(seq) + b"\n" for seq in range(1, 21)))
    reader = OutboxReader(file, "engine", NOTHING_SECRET)
    reader.batch()
    reader.acknowledge(15)
    reader.rewind(4)
    assert reader.batch()[0].event.seq == 4
    with pytest.raises(LookupError):
        reader.rewind(30)


@pytest.mark.parametrize("bad", [b"{not json", b'{"kind": "surprise"}', event(2, 2_000_000)])
def test_invalid_events_are_replaced_by_log_lines(tmp_path: Path, bad: bytes) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(event(1) + b"\n" + bad + b"\n" + event(3) + b"\n")
    reader = OutboxReader(file, "engine", NOTHING_SECRET)
    lines = reader.batch()
    assert [line.event.seq for line in lines] == [1, 2, 3]
    assert "was dropped" in lines[1].event.lines[0]
    EventBatch.model_validate_json(reader.body(lines))


def test_writer_truncates_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    writer = OutboxWriter(file)
    writer.log("stdout", ["one"])
    writer.log("stdout", ["two"])
    file.write_bytes(file.read_bytes()[:-5])
    OutboxWriter(file).log("stderr", ["again"])
    lines = OutboxReader(file, "supervisor", NOTHING_SECRET).batch()
    assert [(line.event.seq, line.event.lines) for line in lines] == [(1, ["one"]), (2, ["again"])]


def test_log_lines_are_followed_across_a_restart_and_bounded(tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path / "1")
    folder.path.mkdir()
    out = folder.log_file("stdout")
    out.write_text("first\nprogress 1\rprogress 2\nhalf")
    LogTail(folder, OutboxWriter(folder.supervisor_events), NOTHING_SECRET).follow()
    with out.open("a") as more:
        more.write(" line\n" + "".join(f"{i}\n" for i in range(1000)) + "last without a break")
    LogTail(folder, OutboxWriter(folder.supervisor_events), NOTHING_SECRET).follow(ended=True)
    told = [
        line
        for entry in OutboxReader(folder.supervisor_events, "supervisor", NOTHING_SECRET).batch()
        for line in entry.event.lines
    ]
    assert told[:2] == ["first", "progress 2"]
    assert told[2].endswith("lines were dropped")
    assert len(told) == 2 + 1 + MAX_LINES_PER_ROUND
    assert told[-1] == "last without a break"
    assert last_lines(folder, NOTHING_SECRET)[-1] == "last without a break"


def test_reading_is_cheap_when_nothing_was_written(tmp_path: Path) -> None:
    """A supervisor polls during training; a poll reads only new data."""
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"".join(event(seq) + b"\n" for seq in range(1, 2001)))
    reader = OutboxReader(file, "engine", NOTHING_SECRET)
    while lines := reader.batch():
        reader.acknowledge(lines[-1].event.seq)
    before = time.process_time()
    for _ in range(100):
        assert reader.batch() == []
    looking = time.process_time() - before
    before = time.process_time()
    OutboxReader(file, "engine", NOTHING_SECRET).batch()
    assert looking < 100 * (time.process_time() - before), "a look without news costs as much as reading everything"


def test_check_manifest_verifies_the_checksum(tmp_path: Path) -> None:
    from worker.artifacts import ArtifactError, check_manifest

    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    check_manifest(tmp_path, hashlib.sha256(b"{}").hexdigest())
    with pytest.raises(ArtifactError, match="damaged"):
        check_manifest(tmp_path, "0" * 64)
    with pytest.raises(FileNotFoundError, match="missing"):
        check_manifest(tmp_path / "nowhere", "0" * 64)


@settings(max_examples=25, deadline=None)
@given(freed=st.lists(st.integers(0, 40), max_size=5), restart_at=st.integers(0, 40))
def test_acknowledged_events_are_punched_and_the_rest_is_readable(
    tmp_path_factory: pytest.TempPathFactory, freed: list[int], restart_at: int
) -> None:
    file = tmp_path_factory.mktemp("outbox") / "events.jsonl"
    file.write_bytes(b"".join(event(seq, 4500) + b"\n" for seq in range(1, 41)))
    size, reader = file.stat().st_size, OutboxReader(file, "engine", NOTHING_SECRET)
    taken: list[int] = []
    for until in [*sorted(freed), 40]:
        if len(taken) >= restart_at:
            reader = OutboxReader(file, "engine", NOTHING_SECRET)  # a supervisor that came back begins with what is there
            reader.batch(3)
            reader.acknowledge(len(taken))
        while len(taken) < until:
            lines = [line for line in reader.batch(3) if line.event.seq <= until]
            reader.acknowledge(taken[-1] if taken else 0)
            taken += [line.event.seq for line in lines if line.event.seq > len(taken)]
            reader.acknowledge(taken[-1])
        reader.free(0, 1)
        assert file.stat().st_size == size
        behind = len(b"".join(event(seq, 4500) + b"\n" for seq in range(1, until + 1)))
        assert abs(reader.backlog_bytes() - (size - behind)) < 4096  # to the block, after a restart
    assert taken == list(range(1, 41))
    assert file.stat().st_blocks * 512 <= 8192, "the disk has it back"


def test_recent_acknowledged_events_are_retained(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"".join(event(seq, 4500) + b"\n" for seq in range(1, 41)))
    reader = OutboxReader(file, "engine", NOTHING_SECRET)
    reader.batch()
    reader.acknowledge(30)
    reader.free(50_000, 1)
    reader.rewind(22)
    assert reader.batch()[0].event.seq == 22
    with pytest.raises(LookupError):
        reader.rewind(10)
