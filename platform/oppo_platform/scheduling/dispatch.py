"""Outbox of launch orders to the nodes' Celery queues: sent after the commit, and again while unclaimed.

Delivery is at least once, or never while the broker is down; both are harmless (see `cycle`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache

import structlog
from celery import Celery
from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Q
from kombu.exceptions import OperationalError

from oppo_contract.wire import LaunchOrder
from oppo_platform import clock
from oppo_platform.runs.launches import launches_due
from oppo_platform.runs.models import AttemptState
from oppo_platform.scheduling.models import Dispatch

log = structlog.get_logger(__name__)

TASK = "oppo.launch"
MOST_AT_ONCE = 500


@cache
def broker(url: str) -> Celery:
    """The sending Celery app; the worker has its own."""
    app = Celery("oppo-platform", broker=url, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        broker_connection_timeout=2.0,
        broker_transport_options={"socket_timeout": 2.0, "socket_connect_timeout": 2.0},
    )
    return app


def send_due() -> int:
    """Send every order that was never sent, or is still unclaimed long after it was. Returns the number sent.

    Call outside a transaction: the orders must have been committed before a node can act on them.
    """
    now = clock.now()
    again = now - timedelta(seconds=settings.OPPO_REDISPATCH_S)
    claimable = Q(launch__isnull=True, attempt__state=AttemptState.ALLOCATED) | Q(launch__in=launches_due())
    due = Dispatch.objects.filter(Q(sent_at__isnull=True) | Q(sent_at__lt=again), claimable)
    sent: list[int] = []
    try:
        for dispatch in due.select_related("attempt").order_by("pk")[:MOST_AT_ONCE]:
            order = LaunchOrder(attempt_id=dispatch.attempt_id, epoch=dispatch.attempt.epoch)
            # Expires when it is due again, so that a queue without a consumer does not fill up.
            broker(settings.REDIS_URL).send_task(
                TASK, kwargs=order.model_dump(), queue=dispatch.queue, retry=False, expires=settings.OPPO_REDISPATCH_S
            )
            sent.append(dispatch.pk)
    except OperationalError as error:
        # Heartbeats carry the same orders; the next cycle tries again.
        log.warning("broker unreachable, heartbeats will carry the orders", error=str(error))
    if sent:
        _store_sent(sent, now)
    return len(sent)


def _store_sent(sent: Sequence[int], now: datetime) -> None:
    """Record the orders as sent. Asynchronous commit: after a crash of the database they are sent again, which is harmless."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL synchronous_commit = off")
        Dispatch.objects.filter(pk__in=sent).update(sent_at=now, sends=F("sends") + 1)
