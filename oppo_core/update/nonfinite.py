"""What follows a loss, gradient or score that is not finite (`ppo.on_nonfinite`; docs/algorithm.md, "Not finite").

`raise` ends the run. `skip` lets go of the batch: no weight and no moment of either role moves. `rollback` goes back to the
newest sound checkpoint with its pool, but draws new prompts and numbers from there on: the same ones would bring the same fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_core.checkpointing.resume_changes import Change
from oppo_core.checkpointing.save_restore import CheckpointError, name_of, restore, verify
from oppo_core.evaluation.evaluator import forget_unfinished
from oppo_core.ppo.optimizer import NonFiniteError

if TYPE_CHECKING:
    from oppo_core.engine.build import Engine


@contextmanager
def tolerated(engine: Engine) -> Iterator[None]:
    """Around a PPO step: what is not finite is dealt with as the spec wants it.

    Raises:
        NonFiniteError: the spec says so, there were `nonfinite_limit` such steps in a row, or no sound checkpoint to go back to.
    """
    try:
        yield
    except NonFiniteError as error:
        ppo, faults = engine.spec.ppo, engine.progress.nonfinite_row + 1
        if ppo.on_nonfinite == "raise":
            raise
        if faults >= ppo.nonfinite_limit:
            raise NonFiniteError(f"{error} ({faults} such steps in a row, ppo.nonfinite_limit)") from error
        failed, total = engine.progress.step, engine.progress.nonfinite_steps + 1
        (_skip if ppo.on_nonfinite == "skip" else _roll_back)(engine, error)
        progress = engine.progress
        progress.nonfinite_steps, progress.nonfinite_row, progress.nonfinite_at = total, faults, failed
        engine.journal.write(
            "decision", step=failed + 1, controller="nonfinite", old=failed + 1, new=engine.progress.step + 1,
            reason=f"{ppo.on_nonfinite}: {error}",
        )  # fmt: skip


def _skip(engine: Engine, error: NonFiniteError) -> None:
    engine.progress.step += 1
    engine.standing.told = {}


def _roll_back(engine: Engine, error: NonFiniteError) -> None:
    folder, changed = _sound_checkpoint(engine, error)
    # What one node has written, others may not see yet.
    seen = sorted({name.decode() for name in engine.ranks.gather(folder.name.encode())})
    if len(seen) > 1:
        raise NonFiniteError(f"{error}; the ranks see different checkpoints to go back to: {', '.join(seen)}") from error
    turns = engine.pool.turns
    engine.handover.forget_all()
    engine.scorers.start_load(str(folder))
    engine.scorers.wait_load()
    restore(engine, folder, changed)
    forget_unfinished(engine)
    engine.pool.turns = turns
    engine.saved = None  # these, and the count of faults, are on no disk yet


def _sound_checkpoint(engine: Engine, error: NonFiniteError) -> tuple[Path, list[Change]]:
    """The newest one between two steps that is whole, and what the spec has changed since; those passed over are logged.

    What is newer than the present step is another attempt's, and a half-done step would train the same answers once more.
    """
    present, unsound = name_of(engine), []
    folders = [
        path for path in (engine.out / "checkpoints").glob("step-*") if "-chunk-" not in path.name and path.name <= present
    ]
    for folder in sorted(folders, reverse=True):
        try:
            changed = verify(folder, engine.spec)
        except CheckpointError as reason:
            unsound.append(str(reason))
            continue
        if unsound:
            lines = ["Passed over when the run went back to a checkpoint:", *unsound]
            engine.journal.write("log", stream="stderr", lines=lines)
        return folder, changed
    raise NonFiniteError("; ".join([f"{error}; there is no checkpoint to go back to yet", *unsound])) from error
