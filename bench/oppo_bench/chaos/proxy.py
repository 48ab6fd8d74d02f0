"""A TCP proxy that can be cut and slowed down: the network between a worker and the platform."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time

CHUNK = 64 * 1024


class Proxy:
    """Forwards connections from `url`'s port to `port` on this machine, in a thread per direction."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.delay_s = 0.0
        self._open = threading.Event()
        self._open.set()
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> None:
        """Reset every connection, and refuse new ones until `heal`."""
        self._open.clear()
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        """Forward again, without a delay."""
        self.delay_s = 0.0
        self._open.set()

    def close(self) -> None:
        """End it."""
        self.cut()
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                theirs, _ = self._server.accept()
                if not self._open.is_set():
                    theirs.close()
                    continue
                threading.Thread(target=self._serve, args=(theirs,), daemon=True).start()

    def _serve(self, theirs: socket.socket) -> None:
        with theirs, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as ours:
            with self._lock:
                self._sockets |= {theirs, ours}
            try:
                self._forward(theirs, ours)
            finally:
                with self._lock:
                    self._sockets -= {theirs, ours}

    def _forward(self, theirs: socket.socket, ours: socket.socket) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(theirs, selectors.EVENT_READ, ours)
            ready.register(ours, selectors.EVENT_READ, theirs)
            while self._open.is_set():
                for key, _ in ready.select(1.0):
                    piece = key.fileobj.recv(CHUNK)  # type: ignore[union-attr]
                    if not piece:
                        return
                    time.sleep(self.delay_s)
                    key.data.sendall(piece)
