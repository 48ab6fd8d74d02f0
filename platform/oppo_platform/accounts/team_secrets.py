"""A team's secrets, for example a hub token. A spec names them; the engine gets them in its environment.

Guarantee: a value is decrypted in two places only, a claim's response and a key rotation. It is never shown again, and is in no
spec,
event, log or audit entry.
"""

from __future__ import annotations

from collections.abc import Mapping

from django.db import transaction
from django.db.models import QuerySet
from typing_extensions import TypedDict

from oppo_contract.sections.secrets import NAME, NAME_WORDS
from oppo_platform import clock
from oppo_platform.accounts import audit, encryption
from oppo_platform.accounts.access import Action, demand
from oppo_platform.accounts.models import Team, TeamSecret, User
from oppo_platform.accounts.services import AccountError

# Shorter ones could not be redacted from logs without redacting ordinary words.
SHORTEST, LONGEST = 8, 8192


class SecretUnavailable(Exception):
    """A run's secret cannot be delivered; the message says why."""


class Rotated(TypedDict):
    """Result of a key rotation: number of re-encrypted secrets, and names of those that no key decrypts."""

    sealed: int
    lost: list[str]


def secret_names(team_id: int) -> list[str]:
    """Names of the team's secrets, sorted."""
    return list(TeamSecret.objects.filter(team_id=team_id).order_by("name").values_list("name", flat=True))


def team_secrets(team: Team) -> QuerySet[TeamSecret]:
    """The team's secrets by name, without values."""
    return team.secrets.select_related("set_by", "last_run").defer("sealed").order_by("name")


@transaction.atomic
def set_secret(actor: User, team: Team, name: str, value: str) -> bool:
    """Set a secret, new or replacing an old value. Returns whether it existed.

    Raises:
        PermissionDenied: the actor is no owner. AccountError: invalid name or value.
    """
    demand(actor, Action.MANAGE_SECRETS, team.pk)
    name, value = name.strip(), value.strip("\r\n")
    if not NAME.fullmatch(name):
        raise AccountError(f"A secret name must have {NAME_WORDS}.")
    if not SHORTEST <= len(value.encode()) <= LONGEST or "\0" in value:
        raise AccountError(f"A secret value must have {SHORTEST} to {LONGEST:,} bytes.")
    given = {"sealed": encryption.encrypt(value, _place(team.pk, name)), "set_by": actor, "set_at": clock.now()}
    _, new = TeamSecret.objects.update_or_create(team=team, name=name, defaults=given)
    audit.record(team.pk, actor, "secret.set" if new else "secret.replace", name)
    return not new


@transaction.atomic
def delete_secret(actor: User, team: Team, name: str) -> None:
    """Delete a secret. Queued runs that need it fail when they start; running ones keep it.

    Raises:
        PermissionDenied: the actor is no owner. TeamSecret.DoesNotExist: there is no such secret.
    """
    demand(actor, Action.MANAGE_SECRETS, team.pk)
    TeamSecret.objects.get(team=team, name=name).delete()
    audit.record(team.pk, actor, "secret.delete", name)


def delivered_secrets(team_id: int, requested: Mapping[str, str], run_id: int, actor: str) -> dict[str, str]:
    """Variable → value for a run's engine, for a claim's response only. Records the delivery; part of the claim.

    Args:
        team_id: the team of the secrets.
        wanted: variable → name of the secret.
        run_id: the run.
        actor: the recipient.

    Raises:
        SecretUnavailable: a secret was deleted since the run was submitted, or its key is lost.
    """
    if not requested:
        return {}
    stored = {secret.name: secret for secret in TeamSecret.objects.filter(team_id=team_id, name__in=requested.values())}
    values = {variable: _opened(stored.get(name), name) for variable, name in requested.items()}
    TeamSecret.objects.filter(pk__in=[secret.pk for secret in stored.values()]).update(last_used_at=clock.now(), last_run=run_id)
    for name in sorted(stored):
        audit.record(team_id, actor, "secret.deliver", name, run=run_id)
    return values


def _opened(secret: TeamSecret | None, name: str) -> str:
    if secret is None:
        raise SecretUnavailable(f"The team's secret {name}, which the run needs, was deleted. Set it again and fork the run.")
    try:
        return encryption.decrypt(bytes(secret.sealed), _place(secret.team_id, name))
    except encryption.DecryptionError as error:
        raise SecretUnavailable(f"The team's secret {name} cannot be decrypted: {error}. Set it again.") from None


@transaction.atomic
def reencrypt_all() -> Rotated:
    """Encrypt every secret with the newest key. A secret that no key decrypts is left and reported."""
    done: Rotated = {"sealed": 0, "lost": []}
    for secret in TeamSecret.objects.select_for_update(of=("self",)).select_related("team").order_by("pk"):
        place = _place(secret.team_id, secret.name)
        if (sealed := encryption.reencrypt(bytes(secret.sealed), place)) is None:
            done["lost"].append(f"{secret.team.name}: {secret.name}")
            continue
        secret.sealed = sealed
        secret.save(update_fields=["sealed"])
        done["sealed"] += 1
    return done


def _place(team_id: int, name: str) -> str:
    return f"team {team_id} secret {name}"
