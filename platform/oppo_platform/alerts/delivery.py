"""Sends due deliveries: mails to users, posts to webhooks.

Guarantee: at least once, and never twice at the same time. A delivery is claimed by compare-and-set in its own transaction
(`FOR UPDATE SKIP LOCKED`; its `due_at` moves forward), sent outside any transaction, and then marked. If the sender dies, the
delivery becomes due again with one try less; receivers recognize a repetition by its id. After `OPPO_DELIVERY_TRIES` tries it has
failed, and the page shows it.
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
from oppo_platform.alerts.url_policy import NotAllowed
from oppo_platform.alerts.webhook_http import NotPosted, post, signed_headers
from oppo_platform.alerts.webhooks import decrypt_secret

log = structlog.get_logger(__name__)

AT_ONCE = 8
MOST_A_ROUND = 64
MAIL_WITHIN_S = 60  # several of the mail server's own time limits
FORGOTTEN_A_ROUND = 1000


class NotDelivered(Exception):
    """A failed try. `final`: further tries would fail, too."""

    def __init__(self, why: str, status: int | None = None, *, final: bool = False) -> None:
        self.status, self.final = status, final
        super().__init__(why)


Parcel = list[Delivery]  # what is sent together: a post, or all mails to one user about a team


def deliver_due() -> int:
    """Send all due deliveries, several at once. Returns the number of tries."""
    claimed = _claim()
    fresh = [delivery for delivery in claimed if delivery.tries <= settings.OPPO_DELIVERY_TRIES]
    for delivery in claimed:
        if delivery not in fresh:
            _mark(
                delivery,
                Delivery.State.FAILED,
                delivery.status,
                "The sender process died during the delivery, also in the last attempt.",
            )
    if fresh:
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="courier") as pool:
            list(pool.map(_deliver, _parcels(fresh)))
    _forget()
    return len(claimed)


def _parcels(claimed: list[Delivery]) -> list[Parcel]:
    """Each post alone; all mails to one user about a team at one time are one mail."""
    result: dict[tuple[int | None, ...], Parcel] = defaultdict(list)
    for delivery in claimed:
        alone = delivery.alert is None or delivery.user_id is None
        result[(delivery.pk,) if alone else (delivery.user_id, delivery.alert.team_id)].append(delivery)
    return list(result.values())


@transaction.atomic
def _claim() -> list[Delivery]:
    now = clock.now()
    waiting = Delivery.objects.filter(state=Delivery.State.WAITING, due_at__lte=now).order_by("due_at", "id")
    ids = list(waiting.select_for_update(skip_locked=True).values_list("pk", flat=True)[:MOST_A_ROUND])
    held_s = settings.OPPO_WEBHOOK_TIMEOUT_S + MAIL_WITHIN_S
    # Deliveries that one thread of a round may send one after another.
    until = now + timedelta(seconds=held_s * (MOST_A_ROUND // AT_ONCE))
    Delivery.objects.filter(pk__in=ids).update(due_at=until, tries=F("tries") + 1)
    return list(Delivery.objects.filter(pk__in=ids).select_related("webhook", "user", "alert").order_by("pk"))


def _deliver(parcel: Parcel) -> None:
    try:
        status, refused = _send(parcel)
        for delivery in parcel:
            _settle(delivery, status, refused)
    finally:
        connection.close()  # the thread's own connection


def _send(parcel: Parcel) -> tuple[int | None, NotDelivered | None]:
    try:
        return (_post(parcel[0]) if parcel[0].webhook is not None else _mail(parcel)), None
    except NotDelivered as refused:
        return refused.status, refused


def _settle(delivery: Delivery, status: int | None, refused: NotDelivered | None) -> None:
    if refused is None:
        _mark(delivery, Delivery.State.SENT, status)
    elif refused.final or delivery.tries >= settings.OPPO_DELIVERY_TRIES:
        log.warning("alert_not_delivered", delivery=delivery.pk, tries=delivery.tries, why=str(refused))
        _mark(delivery, Delivery.State.FAILED, status, str(refused))
    else:
        _mark(delivery, Delivery.State.WAITING, status, str(refused), _wait_s(delivery.tries))


def _wait_s(tries: int) -> float:
    """Seconds before the next try."""
    return settings.OPPO_DELIVERY_RETRY_S * 3.0 ** (tries - 1)


def _post(delivery: Delivery) -> int:
    hook, body = delivery.webhook, delivery.body.encode()
    assert hook is not None
    if not hook.on and delivery.about != Delivery.About.TEST:
        raise NotDelivered("The webhook was disabled.", final=True)
    try:
        headers = signed_headers(decrypt_secret(hook), str(delivery.message_id), clock.now(), body)
        status = post(hook.url, body, headers, settings.OPPO_WEBHOOK_TIMEOUT_S)
    except DecryptionError as error:
        raise NotDelivered(f"The webhook secret cannot be decrypted: {error}. Create the webhook again.", final=True) from error
    except NotAllowed as error:
        raise NotDelivered(str(error), final=True) from error
    except NotPosted as error:
        raise NotDelivered(str(error)) from error
    if 300 <= status < 400:
        raise NotDelivered(
            f"The receiver returned {status}, a redirect. Redirects are not followed: enter the target URL.", status
        )
    if not 200 <= status < 300:
        # 410 Gone: the receiver unsubscribes.
        raise NotDelivered(f"The receiver returned {status}.", status, final=status == 410)
    return status


def _mail(parcel: Parcel) -> None:
    user, alert = parcel[0].user, parcel[0].alert
    assert user is not None
    assert alert is not None
    if not user.is_active or not Membership.objects.filter(team_id=alert.team_id, user=user).exists():
        raise NotDelivered("The user is no longer in the team.", final=True)
    subject, text = messages.one_mail([delivery.body for delivery in parcel])
    try:
        send_notice(user.email, subject, text)
    except MailNotSent as error:
        raise NotDelivered(str(error)) from error


def _mark(delivery: Delivery, state: Delivery.State, status: int | None, error: str = "", wait_s: float = 0.0) -> None:
    now = clock.now()
    done = None if state == Delivery.State.WAITING else now
    Delivery.objects.filter(pk=delivery.pk, state=Delivery.State.WAITING).update(
        state=state, status=status, error=error[:1000], done_at=done, due_at=now + timedelta(seconds=wait_s)
    )


def _forget() -> None:
    """Delete old deliveries; their alerts stay."""
    before = clock.now() - timedelta(seconds=settings.OPPO_DELIVERIES_KEPT_S)
    old = Delivery.objects.exclude(state=Delivery.State.WAITING).filter(done_at__lt=before)
    Delivery.objects.filter(pk__in=list(old.values_list("pk", flat=True)[:FORGOTTEN_A_ROUND])).delete()
