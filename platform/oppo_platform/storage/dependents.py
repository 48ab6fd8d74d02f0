"""Who needs a run's checkpoints, so that they cannot be deleted under them."""

from __future__ import annotations

from django.db.models import Q

from oppo_contract.states import ENDED
from oppo_platform.runs.models import Attempt, Run
from oppo_platform.runs.resume_sources import waiting_for


def dependents(run: Run) -> list[Run]:
    """Other runs, not ended, that begin with one of the run's checkpoints. The run's row is locked, so that none is added."""
    using = Attempt.objects.filter(resume_from__run=run).exclude(run=run)
    waiting = waiting_for(run).exclude(pk=run.pk)
    return list(
        Run.objects.filter(Q(pk__in=using.values("run")) | Q(pk__in=waiting.values("pk")))
        .exclude(state__in=ENDED)
        .defer("spec")
        .order_by("pk")
    )
