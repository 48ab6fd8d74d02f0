"""Who is about to begin with which checkpoint: forks of other runs, and paused runs that go on from an older one of their own."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from django.db.models import Exists, OuterRef, QuerySet

from oppo_contract.states import ENDED
from oppo_platform.runs.models import Checkpoint, Run


def beginning() -> QuerySet[Run]:
    """Runs that begin with a chosen checkpoint, of another run or of their own, and have saved nothing since."""
    newer = Checkpoint.objects.filter(run=OuterRef("pk"), attempt__epoch__gt=OuterRef("begins_after"))
    return Run.objects.filter(begins_with__isnull=False).exclude(state__in=ENDED).exclude(Exists(newer))


def waiting_for(run: Run) -> QuerySet[Run]:
    """Those that begin with a checkpoint of `run`, itself among them."""
    return beginning().filter(begins_with__run=run)


def spared_for_forks(run: Run) -> list[str]:
    """Names of the run's checkpoint folders that its engine must keep, because somebody is about to begin with them."""
    kept = Checkpoint.objects.filter(pk__in=waiting_for(run).values("begins_with"))
    return sorted({folder_name(row) for row in kept})


def folder_name(row: Checkpoint) -> str:
    """The checkpoint's own folder: `step-00000100`, or `step-00000100-chunk-000003` with a half-done step."""
    return unquote(PurePosixPath(urlsplit(row.url).path).name)


def half_done(row: Checkpoint) -> bool:
    """Whether the engine wrote it in the middle of a step, because it was asked to stop."""
    return "-chunk-" in folder_name(row)
