"""Durable outbox of events: a file that one producer appends to, read in order until the platform has acknowledged the events.

Acknowledged events are deleted late (hole punching), because a platform restored from a backup requests them again. Delivery is
at least once; ingest applies each sequence number exactly once.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from pydantic import ValidationError

from oppo_contract.events import MAX_EVENT_BYTES, Event, LogEvent, parse_event
from oppo_contract.wire import MAX_BATCH_BYTES, MAX_BATCH_EVENTS
from worker.redaction import Redactor

Producer = Literal["engine", "supervisor"]
ENVELOPE_BYTES = 256  # of a batch, without its events
READ_AHEAD_BYTES = 2 * MAX_BATCH_BYTES
KEEP_SIZE, PUNCH_HOLE = 0x01, 0x02  # of fallocate(2)


@dataclass(frozen=True, slots=True)
class OutboxRecord:
    """One event, parsed and as JSON."""

    event: Event
    text: bytes


class OutboxReader:
    """Reads an outbox file while its producer appends to it; redacts secrets. Ignores an incomplete last line."""

    def __init__(self, path: Path, producer: Producer, redactor: Redactor) -> None:
        self._redactor = redactor
        self.path = path
        self.producer = producer
        self._offset = 0
        self._last_seq = 0
        self._waiting: deque[OutboxRecord] = deque()
        self._ends: deque[int] = deque()  # file offset of the end of each
        self._acknowledged = 0  # file offset
        self._freed = 0

    def batch(self, max_events: int = MAX_BATCH_EVENTS) -> list[OutboxRecord]:
        """The oldest unacknowledged events that fit in one request."""
        self._read_ahead()
        records: list[OutboxRecord] = []
        size = ENVELOPE_BYTES
        for record in self._waiting:
            size += len(record.text) + 1
            if records and (size > MAX_BATCH_BYTES or len(records) >= max_events):
                break
            records.append(record)
        return records

    def backlog_bytes(self) -> int:
        """Bytes not acknowledged yet."""
        if self._offset == 0:
            self._read_ahead()  # skips the punched hole
        written = self.path.stat().st_size if self.path.exists() else 0
        return max(0, written - self._acknowledged)

    def body(self, records: list[OutboxRecord]) -> bytes:
        """An `EventBatch` of these records, as JSON."""
        return b'{"producer":"%s","events":[%s]}' % (self.producer.encode(), b",".join(record.text for record in records))

    def acknowledge(self, high_water: int) -> list[Event]:
        """Remove events up to `high_water` from the queue and return them, oldest first."""
        done: list[Event] = []
        while self._waiting and self._waiting[0].event.seq <= high_water:
            done.append(self._waiting.popleft().event)
            self._acknowledged = self._ends.popleft()
        return done

    def free(self, retained: float, min_bytes: int) -> None:
        """Free the disk space of acknowledged events except the newest `retained` bytes, if it is at least `min_bytes`."""
        until = int(self._acknowledged - retained)
        if until - self._freed >= min_bytes and punch(self.path, until):
            self._freed = until

    def rewind(self, expected_seq: int) -> None:
        """Continue from an event that the platform lacks. Raises LookupError if it is not in the file."""
        self._offset, self._last_seq, self._acknowledged = 0, 0, 0
        self._waiting.clear()
        self._ends.clear()
        self._read_ahead(until_seq=expected_seq)
        self.acknowledge(expected_seq - 1)
        if not self._waiting or self._waiting[0].event.seq != expected_seq:
            stored = f"the first stored event is {self._waiting[0].event.seq}" if self._waiting else "no later event is stored"
            raise LookupError(
                f"the platform requests event {expected_seq} of the {self.producer}, which is not on the node's disk; {stored}"
            )

    def replace_first(self, why: str) -> None:
        """Replace the oldest event, which the platform rejects, with a log line: sequence numbers must have no gaps."""
        event = self._waiting[0].event
        text = f"event {event.seq} ({event.kind}) was dropped: {why}"
        self._waiting[0] = _placeholder(self.producer, event.seq, text)

    def _read_ahead(self, until_seq: int = 0) -> None:
        waiting_bytes = sum(len(record.text) for record in self._waiting)
        if not self.path.exists():
            return
        with self.path.open("rb") as content:
            if self._offset == 0:
                self._offset = self._acknowledged = first_data(content)
            content.seek(self._offset)
            while waiting_bytes < READ_AHEAD_BYTES or self._last_seq < until_seq:
                text = content.readline()
                if not text.endswith(b"\n"):
                    return
                self._offset = content.tell()
                record = _parse(self.producer, self._last_seq + 1, self._redactor.event(text[:-1].lstrip(b"\0")))
                self._last_seq = record.event.seq
                if record.event.seq < until_seq:
                    self._acknowledged = self._offset
                    continue
                self._waiting.append(record)
                self._ends.append(self._offset)
                waiting_bytes += len(record.text)


class OutboxWriter:
    """The supervisor's outbox; continues the numbering of an earlier supervisor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next_seq = 1 + _truncate_torn_line(path)

    def log(self, stream: Literal["stdout", "stderr", "supervisor"], lines: list[str]) -> None:
        """Append log lines."""
        event = LogEvent(producer="supervisor", seq=self._next_seq, time=time.time(), stream=stream, lines=lines)
        with self.path.open("ab") as out:
            out.write(event.model_dump_json().encode() + b"\n")
        self._next_seq += 1


def _parse(producer: Producer, expected_seq: int, text: bytes) -> OutboxRecord:
    if len(text) > MAX_EVENT_BYTES:
        return _placeholder(producer, expected_seq, f"event {expected_seq} was dropped: it is {len(text):,} bytes long")
    try:
        return OutboxRecord(parse_event(text), text)
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]
        message = f"event {expected_seq} was dropped: {reason['msg']} at {'.'.join(str(part) for part in reason['loc'])}"
        return _placeholder(producer, expected_seq, message)


def _placeholder(producer: Producer, seq: int, text: str) -> OutboxRecord:
    event = LogEvent(producer=producer, seq=seq, time=time.time(), stream="supervisor", lines=[text])
    return OutboxRecord(event, event.model_dump_json().encode())


def _truncate_torn_line(path: Path) -> int:
    """Truncate an incomplete last line. Returns the last sequence number."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) != len(content):
        os.truncate(path, len(complete))  # in place, because the disk may be full
    return _last_seq_in(complete[:-1].split(b"\n") if complete else [])


def _last_seq_in(lines: list[bytes]) -> int:
    """The last sequence number; an unreadable line counts as one event, as in `OutboxReader`."""
    for behind, line in enumerate(reversed(lines)):
        try:
            return int(json.loads(line.lstrip(b"\0"))["seq"]) + behind
        except (ValueError, TypeError, KeyError):
            continue
    return len(lines)


def punch(path: os.PathLike[str], until: int) -> bool:
    """Free the first `until` bytes of a file while its producer appends (FALLOC_FL_PUNCH_HOLE): offsets stay the same.

    Returns whether it succeeded: on Linux with ext4, xfs, btrfs or tmpfs.
    """
    if sys.platform != "linux" or until <= 0:
        return False
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    descriptor = os.open(path, os.O_RDWR)
    try:
        return bool(fallocate(descriptor, KEEP_SIZE | PUNCH_HOLE, 0, until) == 0)
    finally:
        os.close(descriptor)


def first_data(content: IO[bytes]) -> int:
    """Offset of the first data after a hole, rounded down to a block: up to one block of zeros may precede the data."""
    if sys.platform != "linux":
        return 0
    try:
        return os.lseek(content.fileno(), 0, os.SEEK_DATA)
    except OSError:  # empty, or only a hole
        return 0
