"""What people write about a run after its submission: its name, tags and notes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from django.db import transaction

from oppo_platform.accounts import audit
from oppo_platform.notify import run_changed
from oppo_platform.runs.models import Run

MOST_TAGS = 20
LONGEST_NOTES = 20_000
TAG = re.compile(r"[^\s,\"\0]{1,40}")


class TagRefused(ValueError):
    """A tag is not allowed; the message says why."""


class NotesChanged(ValueError):
    """The notes were changed by somebody else; the message says what to do."""


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
        _save(run, actor, "tags", tags=", ".join(stored))


@transaction.atomic
def rename_run(run_id: int, name: str, actor: str) -> None:
    """Rename a run; its spec keeps the name that it was submitted with. `name` is a valid `Name` of the contract."""
    run = Run.objects.select_for_update(of=("self",)).select_related("project").get(pk=run_id)
    if run.name != name:
        old, run.name = run.name, name
        _save(run, actor, "name", renamed_from=old)


@transaction.atomic
def set_notes(run_id: int, text: str, actor: str, before: str | None = None) -> None:
    """Replace a run's notes, Markdown of at most LONGEST_NOTES characters.

    Raises:
        NotesChanged: they are not `before` any more, if that is given.
    """
    run = Run.objects.select_for_update(of=("self",)).select_related("project").get(pk=run_id)
    if before is not None and _lines(run.notes) != _lines(before):
        raise NotesChanged("Somebody else has changed the notes. Copy yours, reload the page, and edit them there.")
    if run.notes != text:
        run.notes = text
        _save(run, actor, "notes", notes=f"{len(text)} characters")


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n")  # as a textarea has it


def _save(run: Run, actor: str, field: str, **details: str) -> None:
    run.cursor += 1
    run.save(update_fields=[field, "cursor"])
    audit.record(run.project.team_id, actor, "run.change", f"run {run.pk} {run.name}", **details)
    run_changed(run.pk)
