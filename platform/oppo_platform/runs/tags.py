"""Tags of runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from django.db import transaction

from oppo_platform.accounts import audit
from oppo_platform.notify import run_changed
from oppo_platform.runs.models import Run

MOST_TAGS = 20
TAG = re.compile(r"[^\s,\"\0]{1,40}")


class TagRefused(ValueError):
    """A tag is not allowed; the message says why."""


@transaction.atomic
def change_tags(run_id: int, add: Sequence[str], remove: Sequence[str], actor: str) -> None:
    """Add and remove tags; idempotent.

    Raises:
        TagRefused: a tag is empty, too long, or has spaces, commas or quotes, or there would be too many.
    """
    for tag in add:
        if not TAG.fullmatch(tag):
            raise TagRefused(f"A tag has 1 to 40 characters without spaces, commas and quotes; “{tag[:60]}” is invalid.")
    run = Run.objects.select_for_update(of=("self",)).select_related("project").get(pk=run_id)
    stored = list(dict.fromkeys([*(tag for tag in run.tags if tag not in remove), *add]))
    if len(stored) > MOST_TAGS:
        raise TagRefused(f"A run has at most {MOST_TAGS} tags.")
    if stored != run.tags:
        run.tags = stored
        run.cursor += 1
        run.save(update_fields=["tags", "cursor"])
        audit.record(run.project.team_id, actor, "run.change", f"run {run.pk} {run.name}", tags=", ".join(stored))
        run_changed(run.pk)
