"""Message channel between the engine and the scorer process over a socket pair, closed when either side exits.

`multiprocessing` pipes can block inside a message without limit. Here a blocked call runs `waiting` every `POLL_S` seconds,
which may raise to abort it.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Callable

POLL_S = 1.0
HEADER = struct.Struct("!Q")


class Channel:
    """One end of the channel. Use it from one thread only; it can be passed to a process at its start."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Create a channel and return both ends."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def send(self, message: object, waiting: Callable[[], None]) -> None:
        """Send a message; returns when the socket buffer holds all of it. Calls `waiting` every `POLL_S` while blocked.

        Raises:
            BrokenPipeError, ConnectionResetError: the other end is closed.
        """
        self._end.settimeout(POLL_S)
        payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        left = memoryview(HEADER.pack(len(payload)) + payload)
        while left:
            try:
                left = left[self._end.send(left) :]
            except TimeoutError:
                waiting()

    def receive(self, waiting: Callable[[], None]) -> object:
        """Receive the next message. Calls `waiting` every `POLL_S` while blocked.

        Raises:
            EOFError, ConnectionResetError: the other end is closed and all messages were received.
        """
        self._end.settimeout(POLL_S)
        (size,) = HEADER.unpack(self._receive_bytes(HEADER.size, waiting))
        return pickle.loads(self._receive_bytes(size, waiting))  # noqa: S301 - the sender is our own child process

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _receive_bytes(self, size: int, waiting: Callable[[], None]) -> bytearray:
        received = bytearray(size)
        left = memoryview(received)
        while left:
            try:
                count = self._end.recv_into(left)
            except TimeoutError:
                waiting()
                continue
            if not count:
                raise EOFError("the other end is closed")
            left = left[count:]
        return received
