"""Sees to it that the checkpoint which the platform knows stays on disk (`oppo_contract.checkpoint_pins` has the law)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath

from oppo_contract.checkpoint_pins import pins_locked, remove_older_pins, write_pins
from oppo_contract.machine import write_private
from oppo_contract.wire import CheckpointRef
from worker.artifacts import path_of
from worker.folders import AttemptFolder


class Keeper:
    """Names the newest registered checkpoint of a run, the one that is being registered, and those that others begin with."""

    def __init__(self, artifacts: Path, attempt: AttemptFolder, resume_from: CheckpointRef | None) -> None:
        self._artifacts = artifacts
        self._attempt = attempt
        known = attempt.registered_file.read_text() if attempt.registered_file.exists() else ""
        self._known = known or (path_of(resume_from.url).name if resume_from is not None else "")
        self._asked = ""
        self._others: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Before the engine starts: what it resumes from is spared, whatever earlier attempts named."""
        with pins_locked(self._artifacts):
            self._name()
            remove_older_pins(self._artifacts, self._attempt.attempt_id)

    def spare_for_others(self, names: Iterable[str]) -> None:
        """Spare these as well, which other runs are about to begin with. Raises OSError; then it is to be asked again."""
        wanted = frozenset(name for name in names if PurePath(name).name == name)
        if wanted == self._others:
            return
        before, self._others = self._others, wanted
        try:
            with pins_locked(self._artifacts):
                self._name()
        except OSError:
            self._others = before
            raise

    def keep(self, folder: Path | None) -> bool:
        """Spare a checkpoint from now on, besides the one that is registered; False when it is gone already."""
        if folder is None:
            return False
        self._asked = folder.name
        with pins_locked(self._artifacts):
            self._name()
            return folder.is_dir()

    def registered(self) -> None:
        """The platform has answered: it resumes from the one asked for, and the one before may go."""
        self._known = self._asked
        write_private(self._attempt.registered_file, self._known)
        with pins_locked(self._artifacts):
            self._name()

    def _name(self) -> None:
        write_pins(self._artifacts, self._attempt.attempt_id, sorted({self._known, self._asked, *self._others} - {""}))
