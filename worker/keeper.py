"""Sees to it that the checkpoint which the platform knows stays on disk (`oppo_contract.spared` has the law)."""

from __future__ import annotations

from pathlib import Path

from oppo_contract.spared import forget_older, locked, spare
from oppo_contract.wire import CheckpointRef
from worker.artifacts import path_of
from worker.folders import AttemptFolder, write_private


class Keeper:
    """Names the newest registered checkpoint of a run, and the one that is being registered. Used by the shipping thread."""

    def __init__(self, artifacts: Path, attempt: AttemptFolder, resume_from: CheckpointRef | None) -> None:
        self._artifacts = artifacts
        self._attempt = attempt
        known = attempt.registered_file.read_text() if attempt.registered_file.exists() else ""
        self._known = known or (path_of(resume_from.url).name if resume_from is not None else "")
        self._asked = ""

    def begin(self) -> None:
        """Before the engine starts: what it resumes from is spared, whatever earlier attempts named."""
        with locked(self._artifacts):
            self._name()
            forget_older(self._artifacts, self._attempt.attempt_id)

    def keep(self, folder: Path | None) -> bool:
        """Spare a checkpoint from now on, besides the one that is registered; False when it is gone already."""
        if folder is None:
            return False
        self._asked = folder.name
        with locked(self._artifacts):
            self._name()
            return folder.is_dir()

    def registered(self) -> None:
        """The platform has answered: it resumes from the one asked for, and the one before may go."""
        self._known = self._asked
        write_private(self._attempt.registered_file, self._known)
        with locked(self._artifacts):
            self._name()

    def _name(self) -> None:
        spare(self._artifacts, self._attempt.attempt_id, sorted({self._known, self._asked} - {""}))
