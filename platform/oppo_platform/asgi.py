"""The web process: `uvicorn oppo_platform.asgi:application`."""

import asyncio
import gc
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import django
from asgiref.sync import sync_to_async
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.core.signals import request_started
from django.db import close_old_connections
from django.http import FileResponse, HttpResponseBase
from django.urls import get_resolver, set_script_prefix

from oppo_platform.web.body_limit import Message, Receive, Send, bounded

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "oppo_platform.settings")

# whitenoise returns open files, which Django reads at once: the files are small or cached.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous iterators")


# While the database cannot be reached each request that needs it holds a thread for 10 s; others must not wait for them.
THREADS = 400


class OneThread(ASGIHandler):
    """Serves each request in one thread of a pool: signals, middleware, view, and the end of its response.

    Django's own handler starts a thread for each request and switches to it at least three times: a third of a short call's
    processor time. The content of a streamed response is read in a thread of its own, as in Django.
    """

    def __init__(self) -> None:
        super().__init__()
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="request")
        self._in_thread = sync_to_async(self._respond, thread_sensitive=False, executor=pool)

    def load_middleware(self, is_async: bool = False) -> None:
        """The synchronous chain, also for asynchronous views, none of which waits before it returns its response."""
        super().load_middleware(is_async=False)

    async def handle(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request of HTTP, its body read before its thread starts."""
        try:
            body = await self.read_body(receive)
        except RequestAborted:
            return
        with body:
            response = await self._in_thread(scope, body)
            if response.streaming:
                await self._stream(response, receive, send)
            else:
                await self.send_response(response, send)

    def _respond(self, scope: Message, body: IO[bytes]) -> HttpResponseBase:
        try:
            set_script_prefix(get_script_prefix(scope))
            request_started.send(sender=type(self), scope=scope)
            request, response = self.create_request(scope, body)
            if request is not None:
                response = self.get_response(request)
                response._handler_class = type(self)
            if isinstance(response, FileResponse):
                response.block_size = self.chunk_size
            if not response.streaming:
                response.close()
            return response
        finally:
            close_old_connections()  # streamed content is read in another thread, and an error does not close the response

    async def _stream(self, response: HttpResponseBase, receive: Receive, send: Send) -> None:
        """Sends the response until it ends or the client leaves."""
        tasks = [asyncio.create_task(each) for each in (self.send_response(response, send), self.listen_for_disconnect(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                await sync_to_async(response.close)()
        for error in ended:
            if isinstance(error, Exception) and not isinstance(error, RequestAborted):
                raise error


django.setup(set_prefix=False)
application = bounded(OneThread())

# Freeze imported objects: the garbage collector would traverse them repeatedly, a tenth of a second each time, during which no
# request is answered. URLs first: the first request would import them.
_ = get_resolver().url_patterns
gc.collect()
gc.freeze()
