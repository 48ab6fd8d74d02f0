"""Checkpoints that are about to be used: by forks of other runs, and by paused runs that resume from an older one."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from django.db.models import Exists, OuterRef, QuerySet

from oppo_contract.states import ENDED
from oppo_platform.runs.models import Checkpoint, Run


def starting_runs() -> QuerySet[Run]:
    """Runs that start from a chosen checkpoint, of another run or their own, and have saved none since."""
    newer = Checkpoint.objects.filter(run=OuterRef("pk"), attempt__epoch__gt=OuterRef("begins_after"))
    return Run.objects.filter(begins_with__isnull=False).exclude(state__in=ENDED).exclude(Exists(newer))


def runs_starting_from(run: Run) -> QuerySet[Run]:
    """Those that start from a checkpoint of `run`, itself included."""
    return starting_runs().filter(begins_with__run=run)


def pinned_for_forks(run: Run) -> list[str]:
    """Names of the run's checkpoint folders that its engine must not delete, because a run is about to start from them."""
    kept = Checkpoint.objects.filter(pk__in=runs_starting_from(run).values("begins_with"))
    return sorted({folder_name(row) for row in kept})


def folder_name(row: Checkpoint) -> str:
    """Name of the checkpoint's folder: `step-00000100`, or `step-00000100-chunk-000003` with an unfinished step."""
    return unquote(PurePosixPath(urlsplit(row.url).path).name)


def is_mid_step(row: Checkpoint) -> bool:
    """Whether the engine wrote it within a step, because of a stop request."""
    return "-chunk-" in folder_name(row)
