"""Builds an attempt's outcome report from the engine's exit status, its last event and its logs."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from oppo_contract.byte_sizes import size
from oppo_contract.events import LOCAL_RANK_SUFFIX, FinishedEvent, parse_event
from oppo_contract.wire import Outcome
from worker.folders import AttemptFolder, EngineEnd
from worker.outbox_limit import FULL_BELOW_BYTES
from worker.redaction import Redactor

SPEC_REJECTED = 2  # exit status of the engine for an invalid spec or command line
# While the engine starts, SIGTERM, as from a shutdown, ends it. Later it saves a checkpoint and exits with status 0.
ENDED_BY_SIGTERM = 128 + signal.SIGTERM
MAX_REASON = 3900
RANK_ERROR = "RankError:"  # prefix of the engine's reason when it lost other ranks
# As the operating system's errors, and the engine before it writes a checkpoint, report it.
DISK_FULL = (*(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)), "no room for a checkpoint")
OutcomeName = Literal["succeeded", "failed", "cancelled", "paused", "preempted", "engine_died", "node_failed"]
OUTCOME_OF_SIGNAL: dict[str, OutcomeName] = {"cancel": "cancelled", "pause": "paused", "preempt": "preempted"}


def build_outcome(
    epoch: int, end: EngineEnd | None, finished: FinishedEvent | None, last_lines: list[str], lost: str = "",
    disk_full: str = "",
) -> Outcome:  # fmt: skip
    """The report of an attempt.

    Args:
        epoch: of the attempt.
        end: how the engine's process ended; None if its supervisor was killed before.
        finished: the engine's last event, if any.
        last_lines: the end of its log.
        lost: why events cannot be delivered any more. Checkpoints may be among them, so training since then does not count.
        disk_full: which disk was full when the engine ended; empty if none was (`find_full_disk`).
    """
    if lost and (finished is None or finished.outcome != "failed"):
        name, reason = OUTCOME_OF_SIGNAL.get((end and end.signal) or "", "node_failed"), lost
    else:
        name, reason = _name_and_reason(end, finished, last_lines)
    if disk_full and name in ("failed", "engine_died", "node_failed"):
        name, reason = "node_failed", f"{disk_full}: {reason}"
    code = end.exit_code if end is not None else None
    return Outcome(epoch=epoch, outcome=name, exit_code=code, reason=reason[:MAX_REASON], last_log_lines=last_lines)


def find_full_disk(texts: Iterable[str], folders: Iterable[Path], *, was_full: bool = False) -> str:
    """`the disk of /data is too full, 0 bytes of 64 GiB free`: the fullest disk, if it is, was or a text says so; else empty.

    A program whose log is on a full disk cannot say so, and after a failed checkpoint the disk has room again.
    """
    usages = [(shutil.disk_usage(folder), folder) for folder in folders if folder.exists()]
    if not usages:
        return ""
    usage, folder = min(usages, key=lambda pair: pair[0].free)
    if usage.free >= FULL_BELOW_BYTES and not any(message in text for text in texts for message in DISK_FULL):
        return f"the disk of {folder} was full shortly before" if was_full else ""
    return f"the disk of {folder} is too full, {size(usage.free)} of {size(usage.total)} free"


def lost_peer(finished: FinishedEvent | None) -> bool:
    """Whether the engine failed because another rank ended or did not respond."""
    return finished is not None and finished.outcome == "failed" and finished.reason.startswith(RANK_ERROR)


def find_root_cause(finished: FinishedEvent | None, folder: AttemptFolder, redactor: Redactor) -> FinishedEvent | None:
    """The last event of local rank 0, or of the local rank whose failure ended it.

    Only rank 0's events are uploaded. Other ranks' files are read if rank 0 lost another rank, or if torchrun killed it half a
    minute after another rank's end.
    """
    if finished is not None and not lost_peer(finished):
        return finished
    for file in sorted(folder.path.glob(folder.engine_events.name + LOCAL_RANK_SUFFIX + "*")):
        event = _last_event(file)
        if event is not None and event.outcome == "failed" and not lost_peer(event):
            return event.model_copy(update={"reason": redactor.text(event.reason)})
    return finished


def _last_event(file: Path) -> FinishedEvent | None:
    lines = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    try:
        last = parse_event(lines[-1]) if lines else None
    except ValidationError:  # incomplete, or written by another version
        return None
    return last if isinstance(last, FinishedEvent) else None


def _name_and_reason(end: EngineEnd | None, finished: FinishedEvent | None, last_lines: list[str]) -> tuple[OutcomeName, str]:
    if finished is not None and finished.outcome != "stopped" and not lost_peer(finished):  # ended before any stop request
        return finished.outcome, finished.reason
    if end is None:
        # Also if the engine saved a checkpoint: it must count as a failure, or a node that kills supervisors would retry forever.
        saved = f"; it saved a checkpoint at step {finished.step}" if finished is not None else ""
        return "node_failed", f"the supervisor was killed, and the engine ended with it{saved}"
    if end.signal is not None:
        reason = finished.reason if finished else f"ended on request to {end.signal}"
        return OUTCOME_OF_SIGNAL[end.signal], end.reason or reason
    if finished is not None and lost_peer(finished):  # the run may be retried
        return "engine_died", finished.reason
    if finished is not None and end.reason is None:  # without a reason the supervisor did not kill it
        return "preempted", f"the engine stopped at step {finished.step}: {finished.reason}"
    if end.node_failed:
        return "node_failed", end.reason or _describe_exit(end.exit_code, last_lines)
    if end.exit_code == ENDED_BY_SIGTERM and end.reason is None:
        return "node_failed", "SIGTERM stopped the engine while it started"
    if end.exit_code == SPEC_REJECTED:
        return "failed", end.reason or "the engine rejected the spec: " + " ".join(last_lines[-5:])
    return "engine_died", end.reason or _describe_exit(end.exit_code, last_lines)


def _describe_exit(exit_code: int, last_lines: list[str]) -> str:
    how = f"was killed by signal {exit_code - 128}" if exit_code > 128 else f"exited with status {exit_code}"
    last = f"; last log line: {last_lines[-1]}" if last_lines else ""
    return f"the engine {how} without finishing{last}"
