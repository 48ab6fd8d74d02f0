"""Idempotent writes: with `Idempotency-Key: …` repeated requests are executed once.

The key's row and the write share one transaction: both are stored or neither, also after a crash. A concurrent request with the
same
key waits for the first one and gets its response, with `Idempotency-Replayed: true`; it counts against the rate limit like any
other. Error responses (4xx, 5xx) are not stored: the next try is executed. Keys belong to a token, or to a logged-in person, and
are stored for a day.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta

from django.core.exceptions import RequestDataTooBig
from django.db import OperationalError, connection, transaction
from django.http import HttpRequest, HttpResponse

from oppo_platform import clock
from oppo_platform.accounts.models import IdempotentReply, User
from oppo_platform.api.problems import problem
from oppo_platform.api.rate_limit import count_request

HEADER = "Idempotency-Key"
LONGEST_KEY = 200
KEPT = timedelta(days=1)
WAITS_FOR_THE_FIRST_MS = 10_000


def run_once(run: Callable[[], HttpResponse], request: HttpRequest, user: User) -> HttpResponse:
    """The response of `run`, called now or on an earlier request of `user` with the same key. Raises `TooMany`."""
    key = request.headers[HEADER]
    if not 0 < len(key) <= LONGEST_KEY or not key.isascii() or not key.isprintable():
        return problem(422, f"An {HEADER} has 1 to {LONGEST_KEY} printable ASCII characters, for example a random UUID.")
    try:
        requested = _digest(request)
    except RequestDataTooBig:
        return run()  # the message says so
    try:
        with transaction.atomic():
            stored = _claim(user, key, requested)
            if stored.status is not None:
                if stored.token_id is not None:
                    request.allowance = count_request(stored.token_id)  # type: ignore[attr-defined]  # as `run` does
                return _replay(stored, requested)
            response = run()
            if response.status_code >= 400:
                transaction.set_rollback(True)
            else:
                _store(stored, response)
            return response
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) != "55P03":  # lock_not_available
            raise
        answer = problem(409, f"A request with this {HEADER} is still being processed. Try again.")
        answer.headers["Retry-After"] = "5"
        return answer


def _digest(request: HttpRequest) -> str:
    asked = "\n".join((str(request.method), request.get_full_path(), "")).encode()
    return hashlib.sha256(asked + request.body).hexdigest()


def _claim(user: User, key: str, digest: str) -> IdempotentReply:
    """The key's row, locked; created if missing. Waits for a concurrent request that has created it."""
    owner = {"user_id": user.pk} if user.bound_token_id is None else {"token_id": user.bound_token_id}
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [str(WAITS_FOR_THE_FIRST_MS)])
    row = IdempotentReply(**owner, key=key, digest=digest, created_at=clock.now())
    IdempotentReply.objects.bulk_create([row], ignore_conflicts=True)
    stored = IdempotentReply.objects.select_for_update().get(**owner, key=key)
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('lock_timeout', '0', true)")
    return stored


def _store(stored: IdempotentReply, response: HttpResponse) -> None:
    stored.status = response.status_code
    stored.content_type = response.get("Content-Type", "")
    if "no-store" in response.get("Cache-Control", ""):
        stored.is_secret = True
    else:
        stored.body = response.content
    stored.save()


def _replay(stored: IdempotentReply, digest: str) -> HttpResponse:
    if stored.digest != digest:
        return problem(422, f"This {HEADER} was used for a different request. Use a new key.")
    if stored.is_secret:
        return problem(409, "This request was already executed. Its response contained a secret, which is not stored.")
    answer = HttpResponse(bytes(stored.body), status=stored.status, content_type=stored.content_type)
    answer.headers["Idempotency-Replayed"] = "true"
    return answer


def forget_old_replies() -> int:
    """Delete rows older than a day; part of the housekeeper's rounds."""
    return IdempotentReply.objects.filter(created_at__lt=clock.now() - KEPT).delete()[0]
