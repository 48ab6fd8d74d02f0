"""Invalidates state in a restored database that may have changed since the backup, and reports losses.

- Live attempts end at the moment of the backup (outcome `restored`); their runs are queued, or stop if that was requested. Their
  supervisors stop at the next heartbeat, as after a lost lease, and may still register checkpoints.
- Devices are in state unknown until their agents report that no unknown process uses them.
- Sequences skip numbers, so that no attempt, run folder or event number is used twice.
- One-time links, join tokens and sessions are void.

With `nothing_since` (a move or an upgrade) this is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import psycopg
from django.contrib.sessions.models import Session
from django.db import transaction
from django.db.models import F
from psycopg import sql

from oppo_contract.states import ENDED, RunState
from oppo_platform import clock
from oppo_platform.accounts import audit, encryption
from oppo_platform.accounts.models import Invite, LoginLink, PasswordLink, TeamSecret
from oppo_platform.alerts.models import Webhook
from oppo_platform.cluster.models import Device, DeviceState, JoinToken
from oppo_platform.runs.attempts import fence, latest_checkpoint
from oppo_platform.runs.checkpoints import files_readable, newer_beside
from oppo_platform.runs.models import LIVE_ATTEMPT, Attempt, Checkpoint, Run
from oppo_platform.runs.transitions import move_run

# Run numbers appear in URLs and folders, so their gap is smaller, but larger than the runs submitted since a backup.
RUNS_SKIPPED, NUMBERS_SKIPPED = 10_000, 1_000_000
RUN_NUMBERS = "runs_run_id_seq"


def invalidate_stale_state(made_at: datetime, what: str) -> int:
    """End live attempts and void links. Returns the number of ended attempts.

    The clock is set to the moment of the backup, so that no later device-hours are charged.
    """
    with clock.use_clock(clock.ManualClock(made_at)), transaction.atomic():
        live = list(Attempt.objects.filter(state__in=LIVE_ATTEMPT).order_by("pk").values_list("pk", flat=True))
        cause = f"The platform was restored from its backup of {made_at:%Y-%m-%d %H:%M} UTC"
        for attempt_id in live:
            fence(attempt_id, "restored", cause, "restore", DeviceState.UNKNOWN)
        away = (DeviceState.GONE, DeviceState.QUARANTINED)
        Device.objects.exclude(state__in=away).update(state=DeviceState.UNKNOWN)
        Run.objects.update(cursor=F("cursor") + NUMBERS_SKIPPED)
        _void_links(made_at)
    record_restore(what, made_at, attempts_ended=len(live))
    return len(live)


def record_restore(what: str, made_at: datetime, **details: object) -> None:
    """Record the restore in the cluster's audit log."""
    with transaction.atomic():
        audit.record(None, audit.SHELL, "platform.restore", what, made_at=made_at.isoformat(), **details)


def _void_links(now: datetime) -> None:
    LoginLink.objects.filter(used_at__isnull=True).update(used_at=now)
    for kind in (PasswordLink, Invite):
        kind.objects.filter(used_at__isnull=True, revoked_at__isnull=True).update(revoked_at=now)
    JoinToken.objects.filter(revoked_at__isnull=True).update(revoked_at=now)
    Session.objects.all().delete()


def advance_sequences(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    """Advance every sequence beyond the numbers that may have been used since the backup."""
    rows = connection.execute("SELECT schemaname, sequencename, coalesce(last_value, 0), max_value FROM pg_sequences").fetchall()
    for schema, name, last, most in rows:
        gap = RUNS_SKIPPED if name == RUN_NUMBERS else NUMBERS_SKIPPED
        assert isinstance(last, int)
        assert isinstance(most, int)
        quoted = sql.Identifier(str(schema), str(name)).as_string(None)
        connection.execute("SELECT setval(%s::regclass, %s)", [quoted, min(most, last + gap)])


@dataclass(frozen=True, slots=True)
class Missing:
    """Registered checkpoints without files here: descriptions of those lost since the backup, and the number of others."""

    lost: list[str]
    gone_before: int  # deleted before the backup, for example by the run's own limit
    elsewhere: int  # in places that this machine cannot read


def missing_checkpoints(were_here: set[int]) -> Missing:
    """Check the files of every registered checkpoint.

    Args:
        were_here: ids of checkpoints whose files were readable when the backup was created.
    """
    rows = Checkpoint.objects.select_related("run").order_by("run_id", "step", "pk")
    away = [(row, place) for row in rows.iterator() if (place := files_readable(row)) != "here"]
    next_ones = {saved.pk for run in Run.objects.exclude(state__in=ENDED) if (saved := latest_checkpoint(run)) is not None}
    needed = were_here | {row.pk for row, place in away if place == "deleted" and row.pk in next_ones}
    lost = [row for row, _ in away if row.pk in needed]
    others = [place for row, place in away if row.pk not in needed]
    words = [
        f"run {row.run_id} {row.run.name}, step {row.step}: {row.url}"
        + " (its next attempt would begin here)" * (row.pk in next_ones)
        for row in lost
    ]
    return Missing(words, others.count("deleted"), others.count("elsewhere"))


def hold_runs_without_files() -> list[str]:
    """Pause waiting runs whose next attempt would begin from files that are not here: it would fail. Returns descriptions.

    Not a run whose worker has saved a newer checkpoint since the backup: the worker registers it before its device is free.
    """
    held = []
    for run in Run.objects.filter(state=RunState.QUEUED).order_by("pk"):
        saved = latest_checkpoint(run)
        if saved is None or files_readable(saved) != "deleted" or newer_beside(saved):
            continue
        why = f"Held by the restore: the files of its checkpoint of step {saved.step} are missing, {saved.url}."
        move_run(run, RunState.PAUSED, f"{why} Put them there and resume it, or resume it from an older checkpoint.", "restore")
        held.append(f"run {run.pk} {run.name}, step {saved.step}: {saved.url}")
    return held


def undecryptable() -> list[str]:
    """Descriptions of team secrets and webhooks that no current key decrypts."""
    secrets = TeamSecret.objects.order_by("team__name", "name").values_list("name", "team__name", "sealed")
    hooks = Webhook.objects.values_list("pk", "sealed")
    sealed = [(f"secret {name} of team {team}", data) for name, team, data in secrets]
    sealed += [(f"the signature of webhook {pk}", data) for pk, data in hooks]
    return [what for what, data in sealed if not encryption.has_key(bytes(data))]
