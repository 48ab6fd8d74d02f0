"""What the engine writes to its standard streams: kept in files, told to the platform line by line, bounded."""

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
LEFT_OUT = "left_out"  # in the state: lines that were left out and not told yet
MAX_LINE_CHARS = 2000
MAX_LINES_A_ROUND = 400
MAX_BYTES_A_ROUND = 512 * 1024
STATE: TypeAdapter[dict[str, int]] = TypeAdapter(dict[str, int])

log = structlog.get_logger("worker.logs")


class LogTail:
    """Follows both streams of one attempt into the supervisor's outbox, without secrets; where it stands survives a restart."""

    def __init__(self, folder: AttemptFolder, outbox: OutboxWriter, redactor: Redactor) -> None:
        self._redactor = redactor
        self._folder = folder
        self._outbox = outbox
        self._state = folder.path / "tails.json"
        self._offsets = _kept_state(self._state)

    def follow(self, *, ended: bool = False, full: bool = False) -> None:
        """Pass new whole lines on; with `ended` also a last one without its line break. While `full` they are counted instead."""
        moved = self._tell_left_out() if not full else False
        for stream in STREAMS:
            file = self._folder.log_file(stream)
            offset = self._offsets.get(stream, 0)
            if not file.exists() or file.stat().st_size == offset:
                continue
            lines, self._offsets[stream] = _new_lines(file, offset, ended, self._redactor)
            if lines and full:
                self._offsets[LEFT_OUT] = self._offsets.get(LEFT_OUT, 0) + len(lines)
            elif lines:
                self._outbox.log(stream, _bounded(lines))
            moved = True
        if ended:
            self._tell_left_out()
        if moved:
            write_private(self._state, json.dumps(self._offsets), synced=False)

    def _tell_left_out(self) -> bool:
        count = self._offsets.pop(LEFT_OUT, 0)
        if count:
            self._outbox.log("supervisor", [f"… {count} lines were dropped because the outbox was full"])
        return count > 0


def last_lines(folder: AttemptFolder, redactor: Redactor) -> list[str]:
    """The end of what the engine wrote, without secrets: its errors if it wrote any, else its output."""
    for stream in ("stderr", "stdout"):
        file = folder.log_file(stream)
        if file.exists() and (lines := _tail(file, redactor)):
            return lines
    return []


def _kept_state(file: Path) -> dict[str, int]:
    """Where an earlier supervisor stood; without a file that says so the streams are told from their beginning."""
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
        block = content.read(MAX_BYTES_A_ROUND)
        at_end = content.tell() == file.stat().st_size
    whole = block if ended and at_end else block[: block.rfind(b"\n") + 1]
    if not whole and len(block) == MAX_BYTES_A_ROUND:  # one line without an end
        whole = block
    text = redactor.text(whole.decode(errors="replace").removesuffix("\n"))
    return [_clean(line) for line in text.split("\n")] if whole else [], offset + len(whole)


def _bounded(lines: list[str]) -> list[str]:
    left_out = len(lines) - MAX_LINES_A_ROUND
    return [f"… {left_out} lines were dropped", *lines[-MAX_LINES_A_ROUND:]] if left_out > 0 else lines


def _clean(line: str) -> str:
    # PostgreSQL stores no NUL, and a progress bar's carriage returns keep only its last state.
    return line.rpartition("\r")[2].replace("\0", "�")[:MAX_LINE_CHARS]
