"""Forks: runs that start from another run's checkpoint; and paused runs that resume from an older checkpoint of their own.

Guarantees: a fork starts from a checkpoint of a run of the same team, with settings under which its state has the same meaning
(`oppo_contract.resume_rules`), or is refused at submit. Deleting a run and starting from one of its checkpoints both lock its
row: the later one is refused. The checkpoint is kept until the new run has its own (`runs.resume_sources`, `storage.dependents`).
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from django.db import transaction

from oppo_contract.resume_rules import REFUSED, diff_specs, max_checkpointed, max_in_flight, min_overcommit, refusing_rule
from oppo_contract.retired import replace_retired_settings
from oppo_contract.sections.run import Fork
from oppo_contract.spec import RunSpec, load_stored_spec
from oppo_contract.spec_errors import SpecError, SpecProblem
from oppo_contract.states import ENDED, RunState
from oppo_platform import clock
from oppo_platform.runs.checkpoints import files_readable
from oppo_platform.runs.lifecycle import NotPossible, resume_run
from oppo_platform.runs.models import Attempt, Change, Checkpoint, Run
from oppo_platform.runs.resume_sources import is_mid_step, starting_runs

SHOWN_VALUE = 80


def fork_source(spec: RunSpec, team_id: int) -> Checkpoint | None:
    """The checkpoint of a fork (run joined): of several at one step, the newest attempt's."""
    if spec.fork is None:
        return None
    runs = Run.objects.filter(pk=spec.fork.run, project__team_id=team_id, deleted_at=None)
    result = Checkpoint.objects.filter(run__in=runs, step=spec.fork.step).select_related("run__project", "attempt")
    return result.order_by("-attempt__epoch", "-id").first()


def fork_problems(spec: RunSpec, team_id: int) -> list[SpecProblem]:
    """Why the spec cannot start from its checkpoint; empty if it can, or names none."""
    if spec.fork is None:
        return []
    saved = fork_source(spec, team_id)
    if saved is None:
        return [_no_such(spec.fork, team_id)]
    newer = Attempt.objects.filter(run=saved.run, epoch__gt=saved.attempt.epoch, start_step__lt=saved.step)
    if saved.run.state not in ENDED and newer.exists():
        reason = f"is being trained again, because run {saved.run_id} resumed from an earlier checkpoint"
        allowed = "an earlier step, or this one when the run has reached it again"
        return [SpecProblem("fork.step", reason, str(saved.step), allowed)]
    if files_readable(saved) == "deleted":
        return [SpecProblem("fork.step", "names a checkpoint whose files were deleted by retention", str(saved.step))]
    try:
        before = load_stored_spec(saved.run.spec)
    except SpecError:
        reason = "was submitted under another spec version, so its state cannot be used"
        return [SpecProblem("fork.run", reason, str(saved.run_id))]
    refused = [(change, rule) for change in diff_specs(before, spec) if (rule := refusing_rule(change.path)) is not None]
    reason = f"cannot differ from run {saved.run_id} in a fork, because"
    problems = [SpecProblem(c.path, f"{reason} {REFUSED[rule][0]}", _as_text(c.new), _as_text(c.old)) for c, rule in refused]
    return problems or _room_problems(saved, before, spec)


def _room_problems(saved: Checkpoint, before: RunSpec, spec: RunSpec) -> list[SpecProblem]:
    """Whether the checkpoint may contain more unfinished answers than the fork's limit: their number is not known here."""
    needed = max_checkpointed(before)
    if not is_mid_step(saved) or needed <= max_in_flight(spec):
        return []
    reason = f"allows {max_in_flight(spec)} responses in flight, but this mid-step checkpoint may contain {needed}"
    asked, least = spec.overlap.overcommit.max, min_overcommit(needed, spec)
    return [SpecProblem("overlap.overcommit.max", reason, str(asked), f"at least {least}, or a checkpoint between two steps")]


def _no_such(fork: Fork, team_id: int) -> SpecProblem:
    runs = Run.objects.filter(pk=fork.run, project__team_id=team_id, deleted_at=None)
    if not runs.exists():
        allowed = "the number of a run of the team, not in its trash"
        return SpecProblem("fork.run", "is not a run of this team", str(fork.run), allowed)
    steps = list(Checkpoint.objects.filter(run__in=runs).order_by("-step").values_list("step", flat=True).distinct()[:20])
    allowed = ("one of " + ", ".join(map(str, sorted(steps)))) if steps else f"run {fork.run} has no checkpoint yet"
    return SpecProblem("fork.step", "is not a step with a checkpoint of the run", str(fork.step), allowed)


def _as_text(value: object) -> str:
    text = "empty" if value is None else str(value)
    return text if len(text) <= SHOWN_VALUE else text[: SHOWN_VALUE - 1] + "…"


def fork_spec(spec: dict[str, Any], run_id: int, step: int | None = None) -> dict[str, Any]:
    """The same spec with a new name; with a step, as a fork from the run's checkpoint of that step."""
    fork = deepcopy(replace_retired_settings(spec))
    fork["name"] = f"{spec['name'][:110]} fork"
    if step is not None:
        fork["fork"] = {"run": run_id, "step": step}
        fork["steps"] = max(spec["steps"], step + 1)
    return fork


def lock_fork_source(spec: RunSpec, team_id: int) -> Checkpoint | None:
    """The checkpoint from which a run being submitted starts, its run locked. Call inside that transaction.

    Raises:
        SpecError: it was deleted since the check.
    """
    saved = fork_source(spec, team_id)
    if saved is not None:
        Run.objects.select_for_update(of=("self",)).get(pk=saved.run_id)
        saved = fork_source(spec, team_id)
    if spec.fork is not None and saved is None:
        raise SpecError([_no_such(spec.fork, team_id)])
    return saved


@transaction.atomic
def resume_at(run_id: int, checkpoint_id: int, actor: str) -> None:
    """Queue a paused run to resume from an older checkpoint of its own.

    Data of later steps stays stored until the new attempt repeats them; then the new data counts.

    Raises:
        Checkpoint.DoesNotExist: it is not one of the run's.
        NotPossible: the run is not paused, has reached its time limit, or the files are gone.
    """
    run = Run.objects.select_for_update(of=("self",)).get(pk=run_id)
    saved = Checkpoint.objects.select_related("attempt").get(pk=checkpoint_id, run=run)
    if run.state != RunState.PAUSED:
        raise NotPossible(
            f"Only a paused run can resume from an older checkpoint; this one is {run.state}. Fork from the checkpoint instead."
        )
    waits = starting_runs().filter(begins_with__run=run, begins_with__step__gt=saved.step).exclude(pk=run.pk).first()
    if waits is not None:
        raise NotPossible(f"Run {waits.pk} is about to start from a later checkpoint of this run, which would be overwritten.")
    if files_readable(saved) == "deleted":
        raise NotPossible("The files of this checkpoint were deleted by retention.")
    Run.objects.filter(pk=run.pk).update(begins_with=saved, begins_after=run.epochs)
    reason = f"Resumes from the checkpoint of step {saved.step} of attempt {saved.attempt.epoch} instead of the latest one."
    Change.objects.create(run=run, what="checkpoint", reason=reason, actor=actor, at=clock.now())
    resume_run(run_id, actor)
