"""Warm starts: supervisors and engines are forked from interpreters that have their imports behind them (oppo_contract.standby).

    agent ── standby supervisor `python -m worker standby`      forks a supervisor for every launch order
      └───── standby engine `python -m oppo_core --standby`     forks an engine for it, before the claim is even answered

A start that does not come about in a moment is made cold, the usual way, and the standby is replaced. Nothing can start twice by
that: the attempt's lock and the claim hold for warm supervisors too, and an engine starts only on its supervisor's word.
Standbys end with the agent, run nothing themselves and open no device.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from oppo_contract.lifeline import inherited_lifeline
from oppo_contract.standby import READY, ROOM, send_order
from oppo_contract.wire import LaunchOrder
from worker.engine_process import WARM_PROGRAM, engine_environ, engine_program

WARM = "OPPO_WARM"
BEGINS_WITHIN_S = 2.0
AGAIN_S = 30.0  # after a standby that died or hung
# Code that was updated under a running worker reaches its standbys, and so its attempts, within this time.
STANDBY_FOR_S = 3600.0
NEVER_BEGAN = -1

log = structlog.get_logger("worker.warm")


class Standby:
    """One interpreter that waits with its imports done; kept alive, and replaced now and then."""

    def __init__(self, arguments: list[str], environ: Mapping[str, str], folder: Path | None, pass_fds: tuple[int, ...]) -> None:
        self._arguments, self._environ, self._folder, self._pass_fds = arguments, environ, folder, pass_fds
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._started_at = float("-inf")

    def keep_alive(self) -> None:
        """Start it when it does not live, at most every half minute, and replace it when it is old."""
        age = time.monotonic() - self._started_at
        alive = self._process is not None and self._process.poll() is None
        if (alive and age < STANDBY_FOR_S) or age < AGAIN_S:
            return
        self.stop()
        self._control, theirs = socket.socketpair()
        self._started_at, self._ready = time.monotonic(), False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._arguments, str(theirs.fileno()), ROOM], env=self._environ, cwd=self._folder,
                stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=(theirs.fileno(), *self._pass_fds),
            )  # fmt: skip

    def fork(self) -> socket.socket | None:
        """A job that a fork is about to take; None when the standby is not there or still importing."""
        if self._control is None or not self._is_ready():
            return None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"j"], [theirs.fileno()], socket.MSG_DONTWAIT)
            except OSError:  # it died, or does not read
                ours.close()
                self.stop()
                return None
        return ours

    def stop(self) -> None:
        """End it, and not what was forked from it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _is_ready(self) -> bool:
        assert self._control is not None
        if not self._ready:
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                self._ready = self._control.recv(1, socket.MSG_DONTWAIT) == READY
        return self._ready


class WarmSupervisor:
    """A supervisor that was forked for one order: what the agent needs of it, as of a `Popen`."""

    def __init__(self, job: socket.socket, order: LaunchOrder) -> None:
        self.order = order
        self.pid = 0
        self._job = job
        self._asked_at = time.monotonic()

    def fileno(self) -> int:
        """Readable when something happened to it."""
        return self._job.fileno()

    def poll(self) -> int | None:
        """None while it lives, then 0; `NEVER_BEGAN` when there is none, and there will be none."""
        try:
            told = self._job.recv(64, socket.MSG_DONTWAIT)
        except BlockingIOError:
            hangs = not self.pid and time.monotonic() - self._asked_at > BEGINS_WITHIN_S
            return NEVER_BEGAN if hangs else None
        except ConnectionResetError:
            told = b""
        if told:
            self.pid = int(told)
            return None
        return 0 if self.pid else NEVER_BEGAN

    def wait(self, timeout: float) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("supervise", timeout)
            select.select([self], [], [], min(left, BEGINS_WITHIN_S))
        return status

    def close(self) -> None:
        """Forget it."""
        self._job.close()


class WarmStarts:
    """The standbys of a node."""

    def __init__(self, folder: Path) -> None:
        lifeline = inherited_lifeline()
        passed = () if lifeline is None else (lifeline,)
        self._supervisors = Standby(["worker", "standby"], os.environ, None, passed)
        self._engines = Standby(["oppo_core", "--standby"], engine_environ(), folder, ())
        self._wanted = [self._supervisors, self._engines] if engine_program() == WARM_PROGRAM else [self._supervisors]
        if os.environ.get(WARM, "1").strip() == "0":
            self._wanted = []

    def keep_alive(self) -> None:
        """See that the standbys live."""
        for standby in self._wanted:
            standby.keep_alive()

    def supervisor(self, order: LaunchOrder) -> WarmSupervisor | None:
        """A supervisor with an engine at hand; None when it has to be started cold."""
        job = self._supervisors.fork()
        if job is None:
            return None
        with contextlib.ExitStack() as passed:
            engine = self._engines.fork()
            fds = [passed.enter_context(engine).fileno()] if engine is not None else []
            try:
                send_order(job, order.model_dump(), fds)
            except OSError as error:  # the fork failed; `poll` will say that nothing began
                log.warning("warm_start_failed", attempt=order.attempt_id, error=str(error))
        return WarmSupervisor(job, order)

    def gave_none(self) -> None:
        """A fork was asked for and did not come: whatever hangs there is replaced."""
        self._supervisors.stop()

    def stop(self) -> None:
        """End the standbys."""
        for standby in self._wanted:
            standby.stop()
