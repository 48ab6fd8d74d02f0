"""Webhooks of a team. Secrets are shown once, stored encrypted, and decrypted only for signing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlsplit

from django.conf import settings
from django.db import transaction
from django.db.models import Prefetch, QuerySet

from oppo_platform import clock
from oppo_platform.accounts import audit, encryption
from oppo_platform.accounts.access import Action, demand
from oppo_platform.accounts.models import Team, User
from oppo_platform.accounts.services import AccountError
from oppo_platform.accounts.team_secrets import Rotated
from oppo_platform.accounts.teams import lock_team
from oppo_platform.alerts import messages
from oppo_platform.alerts.models import Delivery, Webhook
from oppo_platform.alerts.services import parse_conditions
from oppo_platform.alerts.url_policy import UrlNotAllowed, parse_target
from oppo_platform.alerts.webhook_http import check_host, new_secret

MAX_WEBHOOKS = 20
DELIVERIES_SHOWN = 10
RESTORABLE = timedelta(days=1)  # after a deletion


def team_webhooks(team: Team) -> QuerySet[Webhook]:
    """The team's webhooks, oldest first, without their secrets; each with its last deliveries, newest first."""
    last = Delivery.objects.select_related("alert__run").order_by("-id")[:DELIVERIES_SHOWN]
    return (
        _present(team)
        .select_related("created_by")
        .defer("sealed")
        .prefetch_related(Prefetch("deliveries", last, to_attr="last_deliveries"))
        .order_by("id")
    )


@transaction.atomic
def add_webhook(actor: User, team: Team, url: str, conditions: Sequence[str], format: str = "") -> str:
    """Add a webhook. Returns its secret, which is not shown again. Without a format, the host decides (`format_of`).

    Raises:
        PermissionDenied: the actor is no owner. AccountError: the URL is not allowed, the format is unknown, or there are too
            many webhooks.
    """
    demand(actor, Action.MANAGE_ALERTS, team.pk)
    url = url.strip()
    try:
        target = parse_target(url, settings.OPPO_WEBHOOK_PLAIN_HOSTS)
        check_host(target.host)
    except UrlNotAllowed as error:
        raise AccountError(str(error)) from None
    if format and format not in Webhook.Format.values:
        raise AccountError(f"Unknown format {format}; formats are {', '.join(Webhook.Format.values)}.")
    lock_team(team)
    _refuse_too_many(team)
    secret = new_secret()
    hook = Webhook.objects.create(
        team=team,
        url=url,
        format=format or format_of(url),
        sealed=b"",
        conditions=parse_conditions(conditions),
        created_by=actor,
        created_at=clock.now(),
    )
    Webhook.objects.filter(pk=hook.pk).update(sealed=encryption.encrypt(secret, _place(hook.pk)))
    audit.record(team.pk, actor, "webhook.create", target.host, conditions=hook.conditions)
    return secret


@transaction.atomic
def change_webhook(actor: User, team: Team, webhook_id: int, *, on: bool, conditions: Sequence[str]) -> Webhook:
    """Enable or disable a webhook and set its conditions. Pending deliveries of a disabled webhook are not sent.

    Raises:
        PermissionDenied: the actor is no owner. Webhook.DoesNotExist: not in this team. AccountError: unknown condition.
    """
    demand(actor, Action.MANAGE_ALERTS, team.pk)
    hook = _present(team).select_for_update().defer("sealed").get(pk=webhook_id)
    hook.on, hook.conditions = on, parse_conditions(conditions)
    hook.save(update_fields=["on", "conditions"])
    audit.record(team.pk, actor, "webhook.change", webhook_host(hook), on=on, conditions=hook.conditions)
    return hook


@transaction.atomic
def delete_webhook(actor: User, team: Team, webhook_id: int) -> str:
    """Delete a webhook; its pending messages are not sent. Returns its host. Raises as `change_webhook`.

    It can be restored until `purge_deleted` deletes it permanently.
    """
    demand(actor, Action.MANAGE_ALERTS, team.pk)
    lock_team(team)
    hook = _present(team).defer("sealed").get(pk=webhook_id)
    hook.deleted_at = clock.now()
    hook.save(update_fields=["deleted_at"])
    audit.record(team.pk, actor, "webhook.delete", webhook_host(hook))
    return webhook_host(hook)


@transaction.atomic
def restore_webhook(actor: User, team: Team, webhook_id: int) -> Webhook:
    """Undo `delete_webhook`; without effect if the webhook is not deleted.

    Raises:
        PermissionDenied: the actor is no owner. Webhook.DoesNotExist: not in this team, or permanently deleted. AccountError:
            the team has reached its limit since.
    """
    demand(actor, Action.MANAGE_ALERTS, team.pk)
    lock_team(team)
    hook = Webhook.objects.select_related("created_by").defer("sealed").get(team=team, pk=webhook_id)
    if hook.deleted_at is not None:
        _refuse_too_many(team)
        hook.deleted_at = None
        hook.save(update_fields=["deleted_at"])
        audit.record(team.pk, actor, "webhook.restore", webhook_host(hook))
    return hook


def purge_deleted() -> None:
    """Delete webhooks permanently that were deleted `RESTORABLE` ago, with their secrets and deliveries."""
    Webhook.objects.filter(deleted_at__lt=clock.now() - RESTORABLE).delete()


@transaction.atomic
def send_test(actor: User, team: Team, webhook_id: int) -> str:
    """Create the delivery of a test message. Returns the host. Raises as `change_webhook`."""
    demand(actor, Action.MANAGE_ALERTS, team.pk)
    hook = _present(team).defer("sealed").get(pk=webhook_id)
    now = clock.now()
    body = messages.test_body(team, actor, now)
    Delivery.objects.create(webhook=hook, about=Delivery.About.TEST, body=body, created_at=now, due_at=now)
    return webhook_host(hook)


def decrypt_secret(hook: Webhook) -> str:
    """The decrypted secret, only for signing. Raises `encryption.DecryptionError`."""
    return encryption.decrypt(bytes(hook.sealed), _place(hook.pk))


@transaction.atomic
def reencrypt_secrets() -> Rotated:
    """Encrypt the webhooks' secrets with the newest key. Secrets that no key decrypts stay unchanged and are reported as lost."""
    done: Rotated = {"sealed": 0, "lost": []}
    for hook in Webhook.objects.select_for_update(of=("self",)).select_related("team").order_by("pk"):
        if (sealed := encryption.reencrypt(bytes(hook.sealed), _place(hook.pk))) is None:
            done["lost"].append(f"{hook.team.name}: webhook to {webhook_host(hook)}")
            continue
        hook.sealed = sealed
        hook.save(update_fields=["sealed"])
        done["sealed"] += 1
    return done


def format_of(url: str) -> Webhook.Format:
    """The format that the URL's host reads: Slack's and Discord's incoming webhooks have addresses of their own."""
    target = urlsplit(url)
    host = (target.hostname or "").lower()
    if host == "hooks.slack.com":
        return Webhook.Format.SLACK
    if host in ("discord.com", "discordapp.com") and target.path.startswith("/api/webhooks/"):
        return Webhook.Format.DISCORD
    return Webhook.Format.JSON


def webhook_host(hook: Webhook) -> str:
    """The host without the path, which may contain a secret."""
    return hook.url.partition("://")[2].partition("/")[0].partition("?")[0]


def _present(team: Team) -> QuerySet[Webhook]:
    return Webhook.objects.filter(team=team, deleted_at=None)


def _refuse_too_many(team: Team) -> None:
    """Raise `AccountError` if the team may not have one more. The team is locked."""
    if _present(team).count() >= MAX_WEBHOOKS:
        raise AccountError(f"A team has at most {MAX_WEBHOOKS} webhooks.")


def _place(webhook_id: int) -> str:
    return f"webhook {webhook_id} secret"
