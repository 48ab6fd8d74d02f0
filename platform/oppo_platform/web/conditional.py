"""ETags for the API's JSON: an unchanged response becomes a 304 without a body.

The tag is a digest of the sent bytes: it saves the transfer, not the work. Pages contain form tokens and always differ; streams
and downloads have no tag.
"""

from __future__ import annotations

from django.http import HttpRequest, HttpResponseBase
from django.middleware.http import ConditionalGetMiddleware
from django.utils.cache import patch_cache_control

TOLD_ALWAYS = ("RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset")


class ConditionalApi(ConditionalGetMiddleware):
    """Django's conditional GET, for the API only."""

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        """The response with an ETag, or 304."""
        if not request.path.startswith("/api/") or response.streaming or response.status_code != 200:
            return response
        if not response.has_header("Cache-Control"):
            patch_cache_control(response, private=True, no_cache=True)  # cache it, but revalidate each time
        answer = super().process_response(request, response)
        for name in TOLD_ALWAYS:  # headers that Django's 304 omits
            if response.has_header(name):
                answer.headers[name] = response.headers[name]
        return answer
