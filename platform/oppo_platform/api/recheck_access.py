"""Whether who asked may still see the runs: for replies that last, the live stream and those that wait for a log's next lines.

These functions block, and give their connection back to the pool: whoever calls them goes on for long.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.db import connection
from django.http import HttpRequest

from oppo_platform.accounts.access import visible_runs
from oppo_platform.accounts.models import User
from oppo_platform.api.auth import person_of, sends_token


def may_see(request: HttpRequest, run_ids: Collection[int]) -> bool | None:
    """Whether the asker may see all of these runs now; None when nobody is logged in any more."""
    try:
        user = _still_there(request)
        if user is None:
            return None
        return visible_runs(user).filter(pk__in=run_ids).count() == len(set(run_ids))
    finally:
        connection.close()


def _still_there(request: HttpRequest) -> User | None:
    user: Any = person_of(request)
    if user is None or sends_token(request):
        return user
    if not request.session.exists(request.session.session_key):
        return None
    return User.objects.filter(pk=user.pk, is_active=True).first()
