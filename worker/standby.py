"""A supervisor with its imports done that waits for its order: `python -m worker standby FD`, forked once for every attempt."""

from __future__ import annotations

import importlib
import socket
import sys

from oppo_contract.standby import receive_order, serve_forks, show_arguments
from oppo_contract.wire import LaunchOrder
from worker.platform_api import tls
from worker.supervisor import supervise

PROGRAM = (sys.executable, "-m", "worker")


# Imported by others when they are first used.
LATE = ("httpcore", "pynvml")


def supervise_what_comes(control_fd: int) -> int:
    """Wait, and in each fork supervise one attempt; returns its exit status, or 0 when the agent is gone."""
    _import_late_ones()
    show_arguments([*PROGRAM, "standby", "ready"])
    job = serve_forks(control_fd)
    if job is None:
        return 0
    with job:  # open for as long as this process lives: its end tells the agent
        received = receive_order(job)
        if received is None:
            return 0
        order = LaunchOrder.model_validate(received[0])
        standby = socket.socket(fileno=received[1][0]) if received[1] else None
        show_arguments([*PROGRAM, "supervise", str(order.attempt_id), str(order.epoch)])
        return supervise(order.attempt_id, order.epoch, standby)


def _import_late_ones() -> None:
    for name in LATE:
        importlib.import_module(name)
    tls()  # certificates are read once for all forks
