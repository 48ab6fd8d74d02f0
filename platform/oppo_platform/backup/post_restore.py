"""What a platform that was put back must not believe, and what people are told about it.

A backup remembers a moment after which life went on: workers finished what it calls running, numbers were given away that it
calls free, links were used. So before the restored database is anybody's:

- attempts that were live end at the moment of the backup (outcome `restored`); their runs wait, or stop where they were asked to.
  A supervisor that still runs one is told so at its next heartbeat, as after a lost lease, and may register what it has saved;
- devices are unknown until their agents report that nothing is left on them which the platform does not know;
- numbers go on far behind the last one that the backup knows, so that no attempt, run folder or event number means two things;
- links and join tokens that work once, and sessions, are void.

Where nothing has happened since the backup (a move, an upgrade) none of it is needed: `nothing_since`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import psycopg
from django.contrib.sessions.models import Session
from django.db import transaction
from django.db.models import F
from psycopg import sql

from oppo_contract.states import ENDED
from oppo_platform import clock
from oppo_platform.accounts import audit, encryption
from oppo_platform.accounts.models import Invite, LoginLink, PasswordLink, TeamSecret
from oppo_platform.alerts.models import Webhook
from oppo_platform.cluster.models import Device, DeviceState, JoinToken
from oppo_platform.runs.attempts import fence, latest_checkpoint
from oppo_platform.runs.checkpoints import files_readable
from oppo_platform.runs.models import LIVE_ATTEMPT, Attempt, Checkpoint, Run

# A run's number stands in addresses and folders: the gap is small enough to read, and no team submits so many since a backup.
RUNS_SKIPPED, NUMBERS_SKIPPED = 10_000, 1_000_000
RUN_NUMBERS = "runs_run_id_seq"


def settle(made_at: datetime, what: str) -> int:
    """End what the backup took for running, and void what may have been used since. Returns how many attempts ended.

    Time stands at the backup's moment meanwhile: nothing is known of what came later, so no device-hour is charged for it.
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
    note(what, made_at, attempts_ended=len(live))
    return len(live)


def note(what: str, made_at: datetime, **details: object) -> None:
    """Write the restore into the cluster's audit log."""
    with transaction.atomic():
        audit.record(None, audit.SHELL, "platform.restore", what, made_at=made_at.isoformat(), **details)


def _void_links(now: datetime) -> None:
    LoginLink.objects.filter(used_at__isnull=True).update(used_at=now)
    for kind in (PasswordLink, Invite):
        kind.objects.filter(used_at__isnull=True, revoked_at__isnull=True).update(revoked_at=now)
    JoinToken.objects.filter(revoked_at__isnull=True).update(revoked_at=now)
    Session.objects.all().delete()


def skip_numbers(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    """Let every sequence go on behind what may have been given away since the backup."""
    found = connection.execute("SELECT schemaname, sequencename, coalesce(last_value, 0), max_value FROM pg_sequences").fetchall()
    for schema, name, last, most in found:
        gap = RUNS_SKIPPED if name == RUN_NUMBERS else NUMBERS_SKIPPED
        assert isinstance(last, int)
        assert isinstance(most, int)
        connection.execute("SELECT setval(%s::regclass, %s)", [_quoted(str(schema), str(name)), min(most, last + gap)])


def _quoted(schema: str, name: str) -> str:
    return sql.Identifier(schema, name).as_string(None)


@dataclass(frozen=True, slots=True)
class Missing:
    """Registered checkpoints that are not here: those lost since the backup in words, and how many others, by why."""

    lost: list[str]
    gone_before: int  # an engine keeps its newest and best, so most of a long run's are
    elsewhere: int  # where this machine cannot look


def missing_checkpoints(were_here: set[int]) -> Missing:
    """Look for every registered checkpoint.

    Args:
        were_here: ids of those whose files this machine could read when the backup was made.
    """
    rows = Checkpoint.objects.select_related("run").order_by("run_id", "step", "pk")
    away = [(row, place) for row in rows.iterator() if (place := files_readable(row)) != "here"]
    next_ones = {saved.pk for run in Run.objects.exclude(state__in=ENDED) if (saved := latest_checkpoint(run)) is not None}
    wanted = {row.pk for row, place in away if place == "deleted" and row.pk in next_ones}
    lost = [row for row, _ in away if row.pk in were_here | wanted]
    others = [place for row, place in away if row.pk not in were_here | wanted]
    words = [
        f"run {row.run_id} {row.run.name}, step {row.step}: {row.url}"
        + " (its next attempt would begin here)" * (row.pk in next_ones)
        for row in lost
    ]
    return Missing(words, others.count("deleted"), others.count("elsewhere"))


def sealed_for_ever() -> list[str]:
    """Team secrets and webhooks that no key here opens, in words."""
    lost = [f"secret {name} of team {team}" for name, team, sealed in _secrets() if not encryption.key_is_here(bytes(sealed))]
    hooks = Webhook.objects.values_list("pk", "sealed")
    return [*lost, *(f"the signature of webhook {pk}" for pk, sealed in hooks if not encryption.key_is_here(bytes(sealed)))]


def _secrets() -> list[tuple[str, str, bytes]]:
    return list(TeamSecret.objects.order_by("team__name", "name").values_list("name", "team__name", "sealed"))
