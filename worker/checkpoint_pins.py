"""Pins checkpoints that the platform may resume from (`oppo_contract.checkpoint_pins`): the engine does not delete them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath

import structlog

from oppo_contract.checkpoint_pins import pins_locked, remove_older_pins, write_pins
from oppo_contract.machine import write_private
from oppo_contract.wire import CheckpointRef
from worker.artifacts import url_path
from worker.folders import AttemptFolder

log = structlog.get_logger("worker.checkpoint_pins")


class CheckpointPins:
    """Pins of one attempt: the newest registered checkpoint, the one being registered, and those that other runs start from."""

    def __init__(self, artifacts: Path, attempt: AttemptFolder, resume_from: CheckpointRef | None) -> None:
        self._artifacts = artifacts
        self._attempt = attempt
        saved = attempt.registered_file.read_text() if attempt.registered_file.exists() else ""
        self._registered = saved or (url_path(resume_from.url).name if resume_from is not None else "")
        self._pending = ""
        self._others: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Before the engine starts: pin the checkpoint to resume from, and remove the pins of earlier attempts."""
        with pins_locked(self._artifacts):
            self._write()
            remove_older_pins(self._artifacts, self._attempt.attempt_id)

    def pin_for_others(self, names: Iterable[str]) -> None:
        """Also pin these, which other runs are about to start from. After an OSError, call again."""
        requested = frozenset(name for name in names if PurePath(name).name == name)
        if requested == self._others:
            return
        before, self._others = self._others, requested
        try:
            with pins_locked(self._artifacts):
                self._write()
        except OSError:
            self._others = before
            raise

    def pin(self, folder: Path | None) -> bool:
        """Pin a checkpoint that is about to be registered; False if it is already deleted."""
        if folder is None:
            return False
        self._pending = folder.name
        with pins_locked(self._artifacts):
            self._write()
            return folder.is_dir()

    def confirm(self) -> None:
        """The pending checkpoint is registered: unpin the one before. On a full disk it stays pinned, which does no harm."""
        self._registered = self._pending
        try:
            write_private(self._attempt.registered_file, self._registered)
            with pins_locked(self._artifacts):
                self._write()
        except OSError as error:
            log.warning("disk", attempt=self._attempt.attempt_id, detail=str(error))

    def _write(self) -> None:
        write_pins(self._artifacts, self._attempt.attempt_id, sorted({self._registered, self._pending, *self._others} - {""}))
