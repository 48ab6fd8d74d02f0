"""The web process: `uvicorn oppo_platform.asgi:application`."""

import gc
import os
import warnings

import django
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest, HttpResponseBase
from django.urls import get_resolver

from oppo_platform.web.body_limit import bounded

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "oppo_platform.settings")

# whitenoise returns open files, which Django reads at once: the files are small or cached.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")


class OneThread(ASGIHandler):
    """Runs all middleware and the view of a request in one thread.

    Django's own handler awaits most middleware methods one by one, each with a change to the thread and back. Responses are still
    streamed by the event loop.
    """

    def load_middleware(self, is_async: bool = False) -> None:
        """The synchronous chain, also for asynchronous views, none of which waits before it returns its response."""
        super().load_middleware(is_async=False)

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        """The response of that chain."""
        return await sync_to_async(self.get_response, thread_sensitive=True)(request)


django.setup(set_prefix=False)
application = bounded(OneThread())

# Freeze imported objects: the garbage collector would traverse them repeatedly, a tenth of a second each time, during which no
# request is answered. URLs first: the first request would import them.
_ = get_resolver().url_patterns
gc.collect()
gc.freeze()
