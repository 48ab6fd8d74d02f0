"""Messages between the engine and the scorers' process, over a socket that ends with either side.

Python's own pipes block in the middle of a message for as long as the other side likes. Here a wait comes up for air every
`POLL_S` seconds, and whoever waits may end it by raising.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Callable

POLL_S = 1.0
HEADER = struct.Struct("!Q")


class Channel:
    """One end. It belongs to one thread; it can be handed to a process that is being started."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Both ends of a new one."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def send(self, message: object, waiting: Callable[[], None]) -> None:
        """Returns when the system has taken the whole message; calls `waiting` every `POLL_S` while it takes nothing.

        Raises:
            BrokenPipeError, ConnectionResetError: nobody holds the other end any more.
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
        """The next message; calls `waiting` every `POLL_S` while nothing comes.

        Raises:
            EOFError, ConnectionResetError: nobody holds the other end any more, and everything was received.
        """
        self._end.settimeout(POLL_S)
        (size,) = HEADER.unpack(self._exactly(HEADER.size, waiting))
        return pickle.loads(self._exactly(size, waiting))  # noqa: S301 - the other end is a process of this very program

    def close(self) -> None:
        """Let go of this end."""
        self._end.close()

    def _exactly(self, size: int, waiting: Callable[[], None]) -> bytearray:
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
