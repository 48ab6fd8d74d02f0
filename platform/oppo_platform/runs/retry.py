"""A user's retry of a failed run: the same run is queued again (docs/decisions/0005-a-retry-reopens-the-run.md)."""

from __future__ import annotations

from django.db import transaction
from django.db.models import F

from oppo_contract.states import RunState
from oppo_platform import clock
from oppo_platform.accounts.audit import PERSON
from oppo_platform.runs.allowed_actions import refusal
from oppo_platform.runs.attempts import describe_resume, latest_checkpoint
from oppo_platform.runs.checkpoints import files_readable
from oppo_platform.runs.lifecycle import NotPossible, device_seconds
from oppo_platform.runs.models import Run
from oppo_platform.runs.transitions import move_run


@transaction.atomic
def retry_run(run_id: int, actor: str) -> Run:
    """Queue a failed run again, behind runs of its priority, from its last checkpoint or, without one, from its start.

    Its failures and excluded nodes no longer count. Of several concurrent calls exactly one succeeds.

    Raises:
        NotPossible: it has not failed, is in the trash, has reached its time limit, or what it would resume from was deleted.
    """
    run = Run.objects.select_for_update(of=("self",)).get(pk=run_id)
    if run.state != RunState.FAILED:
        raise NotPossible(f"{refusal('retry', run.state)} Only failed runs can be retried.")
    if run.deleted_at is not None:
        raise NotPossible("It is in the trash. Restore it first.")
    now = clock.now()
    if run.max_runtime_s is not None and device_seconds(run, now) >= run.max_runtime_s:
        raise NotPossible("Its time limit is reached. Fork it with a longer one.")
    _require_checkpoint(run)
    Run.objects.filter(pk=run.pk).update(
        queued_at=now, not_before=None, archived_at=None, excluded_nodes=[], retried_after=F("epochs")
    )
    move_run(run, RunState.QUEUED, f"Retried by {actor.removeprefix(PERSON)}. {describe_resume(run)}", actor)
    return run


def _require_checkpoint(run: Run) -> None:
    """Raise `NotPossible` if the run would silently start elsewhere than at its last checkpoint or its fork's."""
    saved = latest_checkpoint(run)
    if saved is None and run.forked_run is not None:
        raise NotPossible(f"The checkpoint of run {run.forked_run} that it started from was deleted. Fork another checkpoint.")
    if saved is not None and files_readable(saved) == "deleted":
        raise NotPossible(f"The files of its last checkpoint, step {saved.step}, were deleted. Fork it to start again.")
