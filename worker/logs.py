"""Tails the engine's stdout and stderr files into the supervisor's outbox, with limits on lines and bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import structlog
from pydantic import TypeAdapter

from oppo_contract.machine import write_private
from worker.folders import AttemptFolder
from worker.outbox import OutboxWriter
from worker.redaction import Redactor

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
LAST_LINES = 50
DROPPED = "left_out"  # key in the state file: dropped lines not yet reported
MAX_LINE_CHARS = 2000
MAX_LINES_PER_ROUND = 400
MAX_BYTES_PER_ROUND = 512 * 1024
STATE: TypeAdapter[dict[str, int]] = TypeAdapter(dict[str, int])

log = structlog.get_logger("worker.logs")


class LogTail:
    """Tails both streams of one attempt, without secrets. Offsets survive a restart."""

    def __init__(self, folder: AttemptFolder, outbox: OutboxWriter, redactor: Redactor) -> None:
        self._redactor = redactor
        self._folder = folder
        self._outbox = outbox
        self._state_file = folder.path / "tails.json"
        self._offsets = _load_offsets(self._state_file)

    def follow(self, *, ended: bool = False, full: bool = False) -> None:
        """Write new complete lines to the outbox; with `ended` also an incomplete last one. While `full`, drop and count them."""
        moved = self._report_dropped() if not full else False
        for stream in STREAMS:
            file = self._folder.log_file(stream)
            offset = self._offsets.get(stream, 0)
            if not file.exists() or file.stat().st_size == offset:
                continue
            lines, self._offsets[stream] = _new_lines(file, offset, ended, self._redactor)
            if lines and full:
                self._offsets[DROPPED] = self._offsets.get(DROPPED, 0) + len(lines)
            elif lines:
                self._outbox.log(stream, _bounded(lines))
            moved = True
        if ended:
            self._report_dropped()
        if moved:
            write_private(self._state_file, json.dumps(self._offsets), synced=False)

    def _report_dropped(self) -> bool:
        count = self._offsets.pop(DROPPED, 0)
        if count:
            self._outbox.log("supervisor", [f"… {count} lines were dropped because the outbox was full"])
        return count > 0


def last_lines(folder: AttemptFolder, redactor: Redactor) -> list[str]:
    """The last lines of stderr, or of stdout if stderr is empty; without secrets."""
    for stream in ("stderr", "stdout"):
        file = folder.log_file(stream)
        if file.exists() and (lines := _tail(file, redactor)):
            return lines
    return []


def _load_offsets(file: Path) -> dict[str, int]:
    """Offsets of an earlier supervisor; empty if the file is missing or unreadable."""
    try:
        return STATE.validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        log.warning("tails_unreadable", file=str(file), detail=str(error)[:200])
        return {}


def _tail(file: Path, redactor: Redactor) -> list[str]:
    with file.open("rb") as content:
        size = content.seek(0, 2)
        content.seek(max(0, size - LAST_LINES * MAX_LINE_CHARS))
        text = redactor.text(content.read().decode(errors="replace"))
    return [_clean(line) for line in text.split("\n") if line.strip()][-LAST_LINES:]


def _new_lines(file: Path, offset: int, ended: bool, redactor: Redactor) -> tuple[list[str], int]:
    with file.open("rb") as content:
        content.seek(offset)
        block = content.read(MAX_BYTES_PER_ROUND)
        at_end = content.tell() == file.stat().st_size
    complete = block if ended and at_end else block[: block.rfind(b"\n") + 1]
    if not complete and len(block) == MAX_BYTES_PER_ROUND:  # a line longer than the limit
        complete = block
    text = redactor.text(complete.decode(errors="replace").removesuffix("\n"))
    return [_clean(line) for line in text.split("\n")] if complete else [], offset + len(complete)


def _bounded(lines: list[str]) -> list[str]:
    dropped = len(lines) - MAX_LINES_PER_ROUND
    return [f"… {dropped} lines were dropped", *lines[-MAX_LINES_PER_ROUND:]] if dropped > 0 else lines


def _clean(line: str) -> str:
    # PostgreSQL text cannot contain NUL. Of a progress bar with carriage returns, keep the last state.
    return line.rpartition("\r")[2].replace("\0", "�")[:MAX_LINE_CHARS]
