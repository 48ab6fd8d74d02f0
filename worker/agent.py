"""The node agent: `python -m worker agent`. One process a node; everything else of the worker is its child.

beat → launch what is unclaimed → collect what ended → sleep until the next beat, a message or a child's end

Under systemd or in a container its end is the end of every run of the node: so what the machine lacks for a moment is told in the
log, and tried again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from oppo_contract.lifeline import Lifeline, inherited_lifeline, watch_lifeline
from oppo_contract.wire import HEARTBEAT_S, LaunchOrder, NodeHeartbeat, NodeOrders, RunningAttempt
from worker.catalogue import CatalogueWatch
from worker.consumer import LAUNCH_FD
from worker.deletions import Deletions
from worker.devices import device_reports
from worker.disks import disks_of
from worker.engine_process import OUR_ENGINE, engine_environ, engine_program
from worker.folders import AttemptFolder, NodeIdentity, WorkerFolder
from worker.gpu_throttling import ClockWatch
from worker.platform_api import PlatformApi, RefusedError, UnacceptableError, Unreachable
from worker.prefork import Fork, ForkServer, start_supervisor
from worker.rendezvous import check_address

WARM = "OPPO_WARM"
LAUNCH_AGAIN_S = 5.0
CONSUMER_AGAIN_S = 5.0
STOP_WITHIN_S = 25.0
ENDED_POLL_S = 0.05

log = structlog.get_logger("worker.agent")


class Wake:
    """A pipe that signals write to, so that `select` returns when a child ended or the agent shall stop."""

    def __init__(self) -> None:
        self.fd, write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        self.stop_asked = False
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, _number: int, _frame: object) -> None:
        self.stop_asked = True

    def drain(self) -> None:
        """Empty the pipe."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            return


@dataclass(slots=True)
class Supervisors:
    """The supervisors of this node: the agent's children, and those that outlived an earlier agent."""

    folder: WorkerFolder
    children: dict[int, subprocess.Popen[bytes] | Fork] = field(default_factory=dict)
    launched_at: dict[int, float] = field(default_factory=dict)
    supervisor_server: ForkServer = field(init=False)
    engine_server: ForkServer = field(init=False)

    def __post_init__(self) -> None:
        warm = os.environ.get(WARM, "1").strip() != "0"
        self.supervisor_server = ForkServer("worker", os.environ if warm else None, Path.cwd())
        our_engine = engine_program() == OUR_ENGINE
        self.engine_server = ForkServer("oppo_core", engine_environ() if warm and our_engine else None, self.folder.path)

    def keep_ready(self) -> None:
        """See that the fork servers run."""
        self.supervisor_server.keep_alive()
        self.engine_server.keep_alive()

    def launch(self, order: LaunchOrder) -> None:
        """Start a supervisor unless one lives or was started a moment ago. A needless one would end by itself."""
        number, now = order.attempt_id, time.monotonic()
        alive = number in self.children or self.folder.attempt(number).supervised() is not None
        if alive or now - self.launched_at.get(number, float("-inf")) < LAUNCH_AGAIN_S:
            return
        self.launched_at[number] = now
        with going_on("launch", attempt=number):  # the next heartbeat lists it again
            fork = start_supervisor(self.supervisor_server, self.engine_server, number, order.epoch)
            self.children[number] = fork or self._start_cold(order)
            log.info("supervisor_launched", attempt=number, epoch=order.epoch, warm=fork is not None)

    def _start_cold(self, order: LaunchOrder) -> subprocess.Popen[bytes]:
        lifeline = inherited_lifeline()  # none when the worker runs alone: then a supervisor may outlive its agent
        return subprocess.Popen(
            [sys.executable, "-m", "worker", "supervise", str(order.attempt_id), str(order.epoch)],
            stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=() if lifeline is None else (lifeline,),
        )  # fmt: skip

    def collect(self) -> None:
        """Forget children that have ended, and start one for every attempt that a killed supervisor left behind."""
        for number, child in list(self.children.items()):
            status = child.poll()
            if status is not None:
                del self.children[number]
                log.info("supervisor_ended", attempt=number, status=status)
        for attempt in self.folder.attempts():
            claim = attempt.kept_claim() if attempt.attempt_id not in self.children else None
            if claim is not None and attempt.supervised() is None:
                self.launch(LaunchOrder(attempt_id=attempt.attempt_id, epoch=claim.epoch))

    def fork_fds(self) -> list[int]:
        """Of supervisors that are no children of this process, so that their end sends no signal: each is readable then."""
        return [child.fileno() for child in self.children.values() if isinstance(child, Fork)]

    def running(self) -> list[RunningAttempt]:
        """Every attempt with a living supervisor, or with something left that the next one will ship and report."""
        return [
            found for attempt in self.folder.attempts() if (found := attempt.supervised() or attempt.left_behind()) is not None
        ]

    def held(self) -> set[int]:
        """Devices whose processes belong to attempts with a living supervisor."""
        claims = [attempt.kept_claim() for attempt in self.folder.attempts() if attempt.supervised() is not None]
        return {index for claim in claims if claim is not None for index in claim.claimed.device_indices}

    def runs(self) -> set[int]:
        """Runs of which an attempt has files here: it runs, or has something left to ship."""
        claims = [attempt.kept_claim() for attempt in self.folder.attempts()]
        return {claim.claimed.run_id for claim in claims if claim is not None}

    def stuck(self) -> dict[int, str]:
        """Devices that a supervisor could not clear, each with what is left there."""
        found = {}
        for attempt in self.folder.attempts():
            said, claim = attempt.stuck(), attempt.kept_claim()
            if said and claim is not None:
                found.update(dict.fromkeys(claim.claimed.device_indices, said))
        return found

    def stop(self, order: LaunchOrder | None = None) -> None:
        """Ask one supervisor, or all, to save, report and go."""
        for attempt in self.folder.attempts():
            if order is None or attempt.attempt_id == order.attempt_id:
                pid = _supervisor_of(attempt)
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):  # it was faster
                        os.kill(pid, signal.SIGTERM)

    def wait(self, within_s: float) -> None:
        """Wait until no supervisor is left, at most `within_s` seconds: who ends before them, a service manager kills them."""
        deadline = time.monotonic() + within_s
        for child in self.children.values():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("supervisor_left_behind", pid=child.pid)
        for attempt in self.folder.attempts():  # those of an earlier agent are nobody's children here
            while (pid := _supervisor_of(attempt)) is not None and time.monotonic() < deadline:
                time.sleep(ENDED_POLL_S)
            if pid is not None and attempt.attempt_id not in self.children:
                log.warning("supervisor_left_behind", pid=pid)


@contextlib.contextmanager
def going_on(doing: str, **about: int) -> Iterator[None]:
    """A lack of processes, threads, memory, descriptors or disk ends what was begun here, and not the agent."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: "can't start new thread"
        log.error("not_done_now", doing=doing, detail=f"{type(error).__name__}: {error}"[:500], **about)


def _supervisor_of(attempt: AttemptFolder) -> int | None:
    """Process id of the living supervisor, which may remove the attempt's folder at any moment."""
    with contextlib.suppress(FileNotFoundError):
        return attempt.supervisor_pid()
    return None


class Consumer:
    """The Celery consumer as a child, started again when it dies; its orders come out of `fd`."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._lifeline = Lifeline()
        self._child: subprocess.Popen[bytes] | None = None
        self._started_at = float("-inf")
        self._rest = b""

    def keep_alive(self) -> None:
        """Start the consumer if it does not live, at most every few seconds."""
        now = time.monotonic()
        if (self._child is not None and self._child.poll() is None) or now - self._started_at < CONSUMER_AGAIN_S:
            return
        self._started_at = now
        self._child = subprocess.Popen(
            [sys.executable, "-m", "worker", "consume"],
            env={**self._lifeline.environ(), LAUNCH_FD: str(self._write_fd)}, pass_fds=(self._lifeline.fd, self._write_fd),
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def orders(self) -> list[LaunchOrder]:
        """What arrived since the last call."""
        try:
            self._rest += os.read(self.fd, 65536)
        except BlockingIOError:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        pairs = (line.split() for line in lines)
        return [LaunchOrder(attempt_id=int(attempt), epoch=int(epoch)) for attempt, epoch in pairs]

    def stop(self) -> None:
        """End the consumer."""
        self._lifeline.close()
        if self._child is not None:
            self._child.wait()


class NodeAgent:
    """Speaks for the node. `run` is its life."""

    def __init__(self, folder: WorkerFolder, node: NodeIdentity) -> None:
        self.api = PlatformApi(node.platform_url, node.node_token)
        self.supervisors = Supervisors(folder)
        self.consumer = Consumer()
        self.catalogue = CatalogueWatch(node.models_roots)
        self.catalogue_wanted = False
        self.deletions = Deletions(node.artifact_root)
        self.disks = disks_of(node.artifact_root, folder.path)
        self.clocks = ClockWatch()
        self.away = False
        self.wake = Wake()

    def run(self, *, keep_attempts: bool) -> None:
        """Work until SIGTERM; then stop the attempts too, unless they shall outlive the agent."""
        next_beat = time.monotonic()
        while not self.wake.stop_asked:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + HEARTBEAT_S
                with going_on("heartbeat"):
                    self._beat()
            for step in (self.supervisors.collect, self.consumer.keep_alive, self.supervisors.keep_ready):
                with going_on(step.__qualname__):
                    step()
            select.select(
                [self.wake.fd, self.consumer.fd, *self.supervisors.fork_fds()], [], [], max(0.0, next_beat - time.monotonic())
            )
            self.wake.drain()
            with going_on("orders"):
                for order in self.consumer.orders():
                    self.supervisors.launch(order)
        self.consumer.stop()
        if not keep_attempts:
            self.supervisors.stop()
            self.supervisors.wait(STOP_WITHIN_S)
        self.supervisors.supervisor_server.stop()
        self.supervisors.engine_server.stop()

    def _beat(self) -> None:
        """Report the node, and act on the reply."""
        catalogue = self.catalogue.news(wanted=self.catalogue_wanted)
        report = NodeHeartbeat(
            devices=device_reports(self.supervisors.held(), self.supervisors.stuck(), self.clocks),
            attempts=self.supervisors.running(),
            catalogue=catalogue,
            deleted=self.deletions.done(),
            disks=self.disks.reports(),
        )
        try:
            orders = self.api.node_heartbeat(report)
        except Unreachable as error:
            if not self.away:
                log.warning("platform_away", detail=str(error)[:200])
            self.away = True
            return
        except (RefusedError, UnacceptableError) as error:
            # Not a reason to end: attempts still run, and an administrator may let the node in again.
            log.error("heartbeat_refused", detail=str(error)[:500])
            return
        self.away = False
        if catalogue is not None:
            self.catalogue.was_told(catalogue)
        self._obey(orders)

    def _obey(self, orders: NodeOrders) -> None:
        self.catalogue_wanted = orders.catalogue_wanted
        for order in orders.stop:
            self.supervisors.stop(order)
        for order in orders.unclaimed:
            self.supervisors.launch(order)
        self.deletions.obey(orders.delete, self.supervisors.runs())


def run_agent(*, keep_attempts: bool = False) -> int:
    """The agent's main program. Ends with status 2 when the node has not joined, or its environment lets no claim succeed."""
    watch_lifeline()
    try:
        check_address()  # otherwise each supervisor would fail at it, for ever
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    folder = WorkerFolder.from_environment()
    node = folder.identity()
    if node is None:
        sys.stderr.write("This node has not joined a platform yet. Run: oppo worker join URL TOKEN\n")
        return 2
    NodeAgent(folder, node).run(keep_attempts=keep_attempts)
    return 0
