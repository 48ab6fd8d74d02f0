"""The last words of an engine's further processes on this node, where several train one run.

The first one's events are shipped. The files of the others stay here, and are read only when the first one says no more than that
it lost another, or nothing at all: torchrun kills whoever has not ended half a minute after another. The process that has ended
the run knows why.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from oppo_contract.events import LOCAL_RANK_SUFFIX, FinishedEvent, parse_event
from worker.folders import AttemptFolder
from worker.outcomes import lost_others
from worker.redaction import Redactor


def cause_of(finished: FinishedEvent | None, folder: AttemptFolder, redactor: Redactor) -> FinishedEvent | None:
    """The engine's last word: the first process's own, or that of the one on this node that it lost."""
    if finished is not None and not lost_others(finished):
        return finished
    told = [_last_word(file) for file in sorted(folder.path.glob(folder.engine_events.name + LOCAL_RANK_SUFFIX + "*"))]
    for word in told:
        if word is not None and word.outcome == "failed" and not lost_others(word):
            return word.model_copy(update={"reason": redactor.text(word.reason)})
    return finished


def _last_word(file: Path) -> FinishedEvent | None:
    lines = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    try:
        last = parse_event(lines[-1]) if lines else None
    except ValidationError:  # written by a process that was dying, or by one of another version
        return None
    return last if isinstance(last, FinishedEvent) else None
