"""The audit log: actor, action, target, time, and network address.

Guarantees: an entry is written in the transaction of its action, so that neither exists without the other; entries are never
changed
or deleted (a trigger refuses it). An entry names things and never contains a token, a password or a secret's value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from django.db import transaction

from oppo_platform import clock
from oppo_platform.accounts.models import AuditEntry, Membership, User

SHELL = "shell"
PERSON = "user:"
ENTRIES_A_PAGE = 50
_address: ContextVar[str | None] = ContextVar("oppo_address", default=None)


@contextmanager
def record_address(address: str | None) -> Iterator[None]:
    """Entries within the block get this network address."""
    token = _address.set(address)
    try:
        yield
    finally:
        _address.reset(token)


def actor_name(user: User) -> str:
    """A person's name in transitions and audit entries."""
    return PERSON + user.username


def record(team_id: int | None, actor: User | str, action: str, target: str, **details: Any) -> None:
    """Add an entry to a team's log, or, without a team, to the cluster's.

    Args:
        actor: a person, or `node:gpu1`, `shell`, `scheduler`.
        action: `noun.verb`, as listed in docs/teams.md.
        target: name of the affected object.
        details: changes, JSON-ready.

    Raises:
        RuntimeError: outside a transaction, where the entry could outlive a failed action.
    """
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError(f"{action} is recorded outside the transaction of its deed")
    AuditEntry.objects.create(
        team_id=team_id,
        at=clock.now(),
        actor=actor if isinstance(actor, str) else actor_name(actor),
        action=action,
        target=target[:300],
        details=details,
        address=_address.get(),
    )


def record_for_person(person: User, actor: User | str, action: str, **details: Any) -> None:
    """Add an entry about a person's account to the log of each of their teams. Raises RuntimeError, as `record`."""
    for team_id in Membership.objects.filter(user=person).order_by("team_id").values_list("team_id", flat=True):
        record(team_id, actor, action, actor_name(person), **details)


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Entries, newest first. `older` is the `before` of the next page; the choices are values in the log."""

    entries: list[AuditEntry]
    older: int | None
    actors: list[str]
    actions: list[str]


def audit_page(
    team_id: int | None, actor: str = "", action: str = "", before: int | None = None, limit: int = ENTRIES_A_PAGE
) -> AuditPage:
    """A page of a team's log, or the cluster's without a team, optionally of one actor or action."""
    log = AuditEntry.objects.filter(team_id=team_id) if team_id is not None else AuditEntry.objects.filter(team=None)
    actors = list(log.order_by("actor").values_list("actor", flat=True).distinct())
    actions = list(log.order_by("action").values_list("action", flat=True).distinct())
    requested = {name: value for name, value in (("actor", actor), ("action", action), ("pk__lt", before)) if value}
    result = list(log.filter(**requested).order_by("-id")[: limit + 1])
    entries = result[:limit]
    return AuditPage(entries, entries[-1].pk if len(result) > limit else None, actors, actions)
