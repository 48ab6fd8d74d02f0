"""Refuses texts with the character NUL, which PostgreSQL cannot hold, where they come in: no row of ours needs one.

Workers' calls are left alone: what engines print is cleaned when it is stored.
"""

from __future__ import annotations

import re

from django.core.exceptions import BadRequest
from django.http import HttpRequest, HttpResponse
from django.utils.deprecation import MiddlewareMixin

from oppo_platform.api.problems import problem

ESCAPED = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # in JSON
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
WORDS = "A text holds the character NUL, which cannot be stored. Leave it out."


class RefuseNul(MiddlewareMixin):
    """Middleware: a query, a form or a JSON body with NUL is refused: 422 by the API, 400 by a page."""

    def process_request(self, request: HttpRequest) -> HttpResponse | None:
        """None when there is none."""
        if request.path.startswith("/api/worker/") or not _has_nul(request):
            return None
        if request.path.startswith("/api/"):
            return problem(422, WORDS)
        raise BadRequest(WORDS)


def _has_nul(request: HttpRequest) -> bool:
    if "\0" in request.path or any("\0" in value for values in request.GET.lists() for value in values[1]):
        return True
    if request.method in ("GET", "HEAD"):
        return False
    if request.content_type in FORMS:
        return any("\0" in value for values in request.POST.lists() for value in values[1])
    return request.content_type == "application/json" and ESCAPED.search(request.body) is not None
