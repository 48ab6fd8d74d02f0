"""How far a run was sent to a tracker. Kept in the run's folder, for the next attempt."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(slots=True)
class Cursor:
    """Of one tracker.

    Args:
        run: the id under which the tracker knows the run.
        step: the last step that was sent.
        settled: steps up to this one are not sent again, also if they are trained again.
        events: the event log, of which everything before byte `offset` was sent.
    """

    run: str
    step: int = 0
    settled: int = 0
    events: str = ""
    offset: int = 0

    def save(self, file: Path) -> None:
        """Write it, whole or not at all."""
        fresh = file.with_name(file.name + ".new")
        fresh.write_text(json.dumps(asdict(self)))
        fresh.replace(file)


def read_cursor(file: Path) -> Cursor:
    """What `file` holds; a new cursor where there is none, or none that can be read."""
    try:
        kept = json.loads(file.read_text())
        kept.pop("metrics", None)  # of an earlier version
        return Cursor(**kept)
    except (OSError, ValueError, TypeError, AttributeError):
        return Cursor(run=uuid.uuid4().hex)
