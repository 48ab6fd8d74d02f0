"""Sends due deliveries: mails to users, posts to webhooks.

Guarantee: at least once, and never twice at the same time. A delivery is claimed in a transaction of its own (`FOR UPDATE SKIP
LOCKED`; `due_at` is postponed), sent outside any transaction, and then marked. If the process dies meanwhile, the delivery is
due again with one try less; receivers recognize a repetition by its id. After `OPPO_DELIVERY_TRIES` tries it has failed.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import structlog
from django.conf import settings
from django.db import connection, transaction
from django.db.models import F

from oppo_platform import clock
from oppo_platform.accounts.encryption import DecryptionError
from oppo_platform.accounts.mail import MailNotSent, send_notice
from oppo_platform.accounts.models import Membership
from oppo_platform.alerts import messages
from oppo_platform.alerts.models import Delivery
from oppo_platform.alerts.url_policy import UrlNotAllowed
from oppo_platform.alerts.webhook_http import PostError, post, signed_headers
from oppo_platform.alerts.webhooks import decrypt_secret, purge_deleted

log = structlog.get_logger(__name__)

THREADS = 8
MAX_PER_ROUND = 64
MAIL_TIMEOUT_S = 60  # with the mail server's own time limits, several in a row
DELETED_PER_ROUND = 1000


class DeliveryError(Exception):
    """A failed try. `final`: do not try again."""

    def __init__(self, why: str, status: int | None = None, *, final: bool = False) -> None:
        self.status, self.final = status, final
        super().__init__(why)


Batch = list[Delivery]  # deliveries sent as one: a post, or all mails about a team to one user


def deliver_due() -> int:
    """Send due deliveries in parallel. Returns the number of deliveries tried."""
    claimed = _claim()
    batches: dict[tuple[int | None, ...], Batch] = defaultdict(list)
    for delivery in claimed:
        if delivery.tries > settings.OPPO_DELIVERY_TRIES:
            error = "The sender process died during the delivery, also in the last attempt."
            _mark(delivery, Delivery.State.FAILED, delivery.status, error)
            continue
        alone = delivery.alert is None or delivery.user_id is None
        batches[(delivery.pk,) if alone else (delivery.user_id, delivery.alert.team_id)].append(delivery)
    if batches:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="delivery") as pool:
            list(pool.map(_deliver, batches.values()))
    _delete_old()
    purge_deleted()
    return len(claimed)


@transaction.atomic
def _claim() -> list[Delivery]:
    now = clock.now()
    waiting = Delivery.objects.filter(state=Delivery.State.WAITING, due_at__lte=now).order_by("due_at", "id")
    ids = list(waiting.select_for_update(skip_locked=True).values_list("pk", flat=True)[:MAX_PER_ROUND])
    # A thread may send this many deliveries, one after the other, before the last one.
    until = now + timedelta(seconds=(settings.OPPO_WEBHOOK_TIMEOUT_S + MAIL_TIMEOUT_S) * (MAX_PER_ROUND // THREADS))
    Delivery.objects.filter(pk__in=ids).update(due_at=until, tries=F("tries") + 1)
    return list(Delivery.objects.filter(pk__in=ids).select_related("webhook", "user", "alert").order_by("pk"))


def _deliver(batch: Batch) -> None:
    try:
        status = _post(batch[0]) if batch[0].webhook is not None else _mail(batch)
        for delivery in batch:
            _mark(delivery, Delivery.State.SENT, status)
    except DeliveryError as error:
        for delivery in batch:
            _mark_failed_try(delivery, error)
    finally:
        connection.close()  # of this thread


def _mark_failed_try(delivery: Delivery, error: DeliveryError) -> None:
    if error.final or delivery.tries >= settings.OPPO_DELIVERY_TRIES:
        log.warning("alert_not_delivered", delivery=delivery.pk, tries=delivery.tries, why=str(error))
        _mark(delivery, Delivery.State.FAILED, error.status, str(error))
    else:
        wait_s = settings.OPPO_DELIVERY_RETRY_S * 3.0 ** (delivery.tries - 1)
        _mark(delivery, Delivery.State.WAITING, error.status, str(error), wait_s)


def _post(delivery: Delivery) -> int:
    hook, text = delivery.webhook, delivery.body
    assert hook is not None
    if hook.deleted_at is not None:
        raise DeliveryError("The webhook was deleted.", final=True)
    if not hook.on and delivery.about != Delivery.About.TEST:
        raise DeliveryError("The webhook was disabled.", final=True)
    if hook.format != hook.Format.JSON:
        text = messages.as_chat_message(text, hook.Format(hook.format))
    body = text.encode()
    try:
        headers = signed_headers(decrypt_secret(hook), str(delivery.message_id), clock.now(), body)
        status = post(hook.url, body, headers, settings.OPPO_WEBHOOK_TIMEOUT_S)
    except DecryptionError as error:
        raise DeliveryError(f"The webhook secret cannot be decrypted: {error}. Create the webhook again.", final=True) from error
    except UrlNotAllowed as error:
        raise DeliveryError(str(error), final=True) from error
    except PostError as error:
        raise DeliveryError(str(error)) from error
    if 300 <= status < 400:
        raise DeliveryError(
            f"The receiver returned {status}, a redirect. Redirects are not followed: enter the target URL.", status
        )
    if not 200 <= status < 300:
        # 410 Gone: the receiver has ended the subscription.
        raise DeliveryError(f"The receiver returned {status}.", status, final=status == 410)
    return status


def _mail(batch: Batch) -> None:
    user, alert = batch[0].user, batch[0].alert
    assert user is not None
    assert alert is not None
    if not user.is_active or not Membership.objects.filter(team_id=alert.team_id, user=user).exists():
        raise DeliveryError("The user is no longer in the team.", final=True)
    subject, text = messages.merge_mails([delivery.body for delivery in batch])
    try:
        send_notice(user.email, subject, text)
    except MailNotSent as error:
        raise DeliveryError(str(error)) from error


def _mark(delivery: Delivery, state: Delivery.State, status: int | None, error: str = "", wait_s: float = 0.0) -> None:
    now = clock.now()
    done = None if state == Delivery.State.WAITING else now
    Delivery.objects.filter(pk=delivery.pk, state=Delivery.State.WAITING).update(
        state=state, status=status, error=error[:1000], done_at=done, due_at=now + timedelta(seconds=wait_s)
    )


def _delete_old() -> None:
    """Delete old deliveries, not their alerts."""
    before = clock.now() - timedelta(seconds=settings.OPPO_DELIVERIES_KEPT_S)
    old = Delivery.objects.exclude(state=Delivery.State.WAITING).filter(done_at__lt=before)
    Delivery.objects.filter(pk__in=list(old.values_list("pk", flat=True)[:DELETED_PER_ROUND])).delete()
