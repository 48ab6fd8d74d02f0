"""The documentation: the built site, or how to build it and the Markdown of a checkout. Public, and the same for everybody."""

from __future__ import annotations

import mimetypes
import os
from pathlib import Path

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import SuspiciousFileOperation
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils._os import safe_join
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import conditional_page, require_safe

HOME = "index.html"


@login_not_required
@require_safe
@gzip_page
@conditional_page
def docs(request: HttpRequest, page: str = HOME) -> HttpResponse:
    """A file of the built site; without the site, a page that says how to build it."""
    if page.endswith("/"):
        page += HOME
    if (settings.DOCS_SITE / HOME).is_file():
        return _file(settings.DOCS_SITE, page)
    if page.endswith(".md"):
        return _file(settings.DOCS_MARKDOWN, page)
    source = page.removesuffix(".html") + ".md"
    context = {"section": "docs", "page": page, "source": source if os.path.isfile(_path(settings.DOCS_MARKDOWN, source)) else ""}
    return render(request, "docs.html", context, status=200 if page == HOME or context["source"] else 404)


def _path(folder: Path, page: str) -> Path:
    try:
        return Path(safe_join(folder, page))
    except (SuspiciousFileOperation, ValueError):
        raise Http404 from None


def _file(folder: Path, page: str) -> HttpResponse:
    path = _path(folder, page)
    if not os.path.isfile(path):  # False for a name that is too long, which Path.is_file raises
        raise Http404
    kind = "text/plain; charset=utf-8" if path.suffix == ".md" else mimetypes.guess_type(path.name)[0]
    return HttpResponse(path.read_bytes(), content_type=kind or "application/octet-stream")
