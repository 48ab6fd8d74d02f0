"""How much of a run was sent to a tracker; saved in the run's folder for the next attempt."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(slots=True)
class Cursor:
    """The cursor of one tracker.

    Args:
        run: the run's id in the tracker.
        step: the last step sent.
        settled: steps up to this one are not sent again, even if they are trained again.
        events: the event log, sent up to byte `offset`.
    """

    run: str
    step: int = 0
    settled: int = 0
    events: str = ""
    offset: int = 0

    def save(self, file: Path) -> None:
        """Write the file atomically."""
        fresh = file.with_name(file.name + ".new")
        fresh.write_text(json.dumps(asdict(self)))
        fresh.replace(file)


def read_cursor(file: Path) -> Cursor:
    """The cursor in `file`; a new one if the file is missing or unreadable."""
    try:
        saved = json.loads(file.read_text())
        saved.pop("metrics", None)  # written by earlier versions
        return Cursor(**saved)
    except (OSError, ValueError, TypeError, AttributeError):
        return Cursor(run=uuid.uuid4().hex)
