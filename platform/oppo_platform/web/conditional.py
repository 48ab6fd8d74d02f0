"""ETags for the API's JSON: who has the newest reply already gets a 304 without a body.

The tag is a digest of the bytes that go out, compressed ones where they are: it spares the transfer and not the work. Pages hold
form tokens and differ each time; streams and downloads have no tag.
"""

from __future__ import annotations

from django.http import HttpRequest, HttpResponseBase
from django.middleware.http import ConditionalGetMiddleware
from django.utils.cache import patch_cache_control

TOLD_ALWAYS = ("RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset")


class ConditionalApi(ConditionalGetMiddleware):
    """Django's conditional GET, for the API alone."""

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        """The response, with an ETag, or 304 in its place."""
        if not request.path.startswith("/api/") or response.streaming or response.status_code != 200:
            return response
        if not response.has_header("Cache-Control"):
            patch_cache_control(response, private=True, no_cache=True)  # keep it, but ask each time
        answer = super().process_response(request, response)
        for name in TOLD_ALWAYS:  # what Django's 304 leaves out
            if response.has_header(name):
                answer.headers[name] = response.headers[name]
        return answer
