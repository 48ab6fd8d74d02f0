"""Events on disk: appended by their producer, read from here in order, and kept until the platform has acknowledged them.

The newest of them are kept longer: a platform that was restored from a backup gets what it has forgotten again.

Delivery is at least once (a batch whose answer was lost is sent again); ingest applies each number exactly once.
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
ENVELOPE_BYTES = 256  # what stands around the events of a batch
READ_AHEAD_BYTES = 2 * MAX_BATCH_BYTES
KEEP_SIZE, PUNCH_HOLE = 0x01, 0x02  # of fallocate(2)


@dataclass(frozen=True, slots=True)
class Line:
    """One event as it travels, and as we understand it."""

    event: Event
    text: bytes


class OutboxReader:
    """Reads an outbox file that somebody else appends to. A last line without its line break is not there yet.

    Secrets are struck here, so that nothing behind this class sees one.
    """

    def __init__(self, path: Path, producer: Producer, redactor: Redactor) -> None:
        self._redactor = redactor
        self.path = path
        self.producer = producer
        self._offset = 0
        self._last_seq = 0
        self._waiting: deque[Line] = deque()
        self._ends: deque[int] = deque()  # where each of them ends in the file
        self._acknowledged = 0  # up to here in the file
        self._freed = 0

    def batch(self, max_events: int = MAX_BATCH_EVENTS) -> list[Line]:
        """The oldest events that are not acknowledged, as many as one request may hold; empty when there are none."""
        self._read_on()
        lines: list[Line] = []
        size = ENVELOPE_BYTES
        for line in self._waiting:
            size += len(line.text) + 1
            if lines and (size > MAX_BATCH_BYTES or len(lines) >= max_events):
                break
            lines.append(line)
        return lines

    def backlog_bytes(self) -> int:
        """What the platform has not acknowledged yet."""
        if self._offset == 0:
            self._read_on()  # what was given back to the disk is no backlog
        written = self.path.stat().st_size if self.path.exists() else 0
        return max(0, written - self._acknowledged)

    def body(self, lines: list[Line]) -> bytes:
        """An `EventBatch` of these lines, as JSON."""
        return b'{"producer":"%s","events":[%s]}' % (self.producer.encode(), b",".join(line.text for line in lines))

    def acknowledge(self, high_water: int) -> list[Event]:
        """Forget events up to `high_water`; returns those that were waiting, oldest first."""
        done: list[Event] = []
        while self._waiting and self._waiting[0].event.seq <= high_water:
            done.append(self._waiting.popleft().event)
            self._acknowledged = self._ends.popleft()
        return done

    def free(self, keep: float, at_least: int) -> None:
        """Give the disk back what has been acknowledged, but for the newest `keep` bytes; not less than `at_least` at once."""
        until = int(self._acknowledged - keep)
        if until - self._freed >= at_least and punch(self.path, until):
            self._freed = until

    def rewind(self, expected_seq: int) -> None:
        """Go back to an event that the platform misses.

        Raises:
            LookupError: the file does not hold it; the message tells people so.
        """
        self._offset, self._last_seq, self._acknowledged = 0, 0, 0
        self._waiting.clear()
        self._ends.clear()
        self._read_on(until_seq=expected_seq)
        self.acknowledge(expected_seq - 1)
        if not self._waiting or self._waiting[0].event.seq != expected_seq:
            there = (
                f"the first stored event is {self._waiting[0].event.seq}" if self._waiting else "no later event is there either"
            )
            raise LookupError(
                f"the platform asks for event {expected_seq} of the {self.producer}, which is not on the node's disk; {there}"
            )

    def replace_first(self, why: str) -> None:
        """Put a log line in the place of the oldest event, which the platform does not take: numbers must stay without gaps."""
        line = self._waiting[0]
        self._waiting[0] = _stand_in(
            self.producer, line.event.seq, f"event {line.event.seq} ({line.event.kind}) was dropped: {why}"
        )

    def _read_on(self, until_seq: int = 0) -> None:
        waiting_bytes = sum(len(line.text) for line in self._waiting)
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
                line = _read(self.producer, self._last_seq + 1, self._redactor.event(text[:-1].lstrip(b"\0")))
                self._last_seq = line.event.seq
                if line.event.seq < until_seq:
                    self._acknowledged = self._offset
                    continue
                self._waiting.append(line)
                self._ends.append(self._offset)
                waiting_bytes += len(line.text)


class OutboxWriter:
    """The supervisor's own outbox: what it has to tell, numbered on where an earlier supervisor stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next_seq = 1 + _drop_torn_line(path)

    def log(self, stream: Literal["stdout", "stderr", "supervisor"], lines: list[str]) -> None:
        """Append lines that the engine or the supervisor wrote."""
        event = LogEvent(producer="supervisor", seq=self._next_seq, time=time.time(), stream=stream, lines=lines)
        with self.path.open("ab") as out:
            out.write(event.model_dump_json().encode() + b"\n")
        self._next_seq += 1


def _read(producer: Producer, expected_seq: int, text: bytes) -> Line:
    if len(text) > MAX_EVENT_BYTES:
        return _stand_in(producer, expected_seq, f"event {expected_seq} was dropped: it is {len(text):,} bytes long")
    try:
        return Line(parse_event(text), text)
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]
        said = f"event {expected_seq} was dropped: {reason['msg']} at {'.'.join(str(part) for part in reason['loc'])}"
        return _stand_in(producer, expected_seq, said)


def _stand_in(producer: Producer, seq: int, said: str) -> Line:
    event = LogEvent(producer=producer, seq=seq, time=time.time(), stream="supervisor", lines=[said])
    return Line(event, event.model_dump_json().encode())


def _drop_torn_line(path: Path) -> int:
    """Cut off a last line that was not written whole; returns the number of the last event."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) != len(content):
        os.truncate(path, len(whole))  # in place: a full disk has no room for a copy
    return _last_number(whole[:-1].split(b"\n") if whole else [])


def _last_number(lines: list[bytes]) -> int:
    """A line that cannot be read has the number after the one before, as it has for `OutboxReader`."""
    for behind, line in enumerate(reversed(lines)):
        try:
            return int(json.loads(line.lstrip(b"\0"))["seq"]) + behind
        except (ValueError, TypeError, KeyError):
            continue
    return len(lines)


def punch(path: os.PathLike[str], until: int) -> bool:
    """Free the file's first `until` bytes while its producer appends: offsets stay, the bytes become a hole.

    Returns whether that was possible: on Linux with ext4, xfs, btrfs or tmpfs. Elsewhere the file keeps its size.
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
    """Where the file's content begins behind a hole; within the first block there may still be zeros in front of it."""
    if sys.platform != "linux":
        return 0
    try:
        return os.lseek(content.fileno(), 0, os.SEEK_DATA)
    except OSError:  # empty, or all hole
        return 0
