"""Node agent: `python -m worker agent`. One process per node, the parent of all other worker processes.

heartbeat → launch unclaimed attempts → collect ended supervisors → sleep until the next heartbeat, a message or a child's end

Under systemd or in a container, the end of the agent ends every run of the node. So a temporary lack of resources is logged, and
the action is repeated.
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
from worker.catalogue import CatalogueScanner
from worker.consumer import LAUNCH_FD
from worker.deletions import Deletions
from worker.devices import device_reports
from worker.disks import node_disks
from worker.engine_process import DEFAULT_ENGINE, engine_environ, engine_program
from worker.folders import NodeIdentity, WorkerFolder
from worker.gpu_throttling import ThrottleMonitor
from worker.platform_api import PlatformApi, RefusedError, UnacceptableError, Unreachable
from worker.prefork import Fork, ForkServer, start_supervisor
from worker.rendezvous import check_address

WARM = "OPPO_WARM"
RELAUNCH_AFTER_S = 5.0
CONSUMER_RESTART_S = 5.0
STOP_TIMEOUT_S = 25.0
POLL_S = 0.05

log = structlog.get_logger("worker.agent")


class WakePipe:
    """A pipe that signals write to, so that `select` returns when a child ends or a stop is requested."""

    def __init__(self) -> None:
        self.fd, write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        self.stop_requested = False
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, _number: int, _frame: object) -> None:
        self.stop_requested = True

    def drain(self) -> None:
        """Empty the pipe."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            return


@dataclass(slots=True)
class Supervisors:
    """The supervisors of this node: children of the agent, and supervisors that outlived an earlier agent."""

    folder: WorkerFolder
    children: dict[int, subprocess.Popen[bytes] | Fork] = field(default_factory=dict)
    launched_at: dict[int, float] = field(default_factory=dict)
    supervisor_server: ForkServer = field(init=False)
    engine_server: ForkServer = field(init=False)

    def __post_init__(self) -> None:
        warm = os.environ.get(WARM, "1").strip() != "0"
        self.supervisor_server = ForkServer("worker", os.environ if warm else None, Path.cwd())
        our_engine = engine_program() == DEFAULT_ENGINE
        self.engine_server = ForkServer("oppo_core", engine_environ() if warm and our_engine else None, self.folder.path)

    def keep_servers_alive(self) -> None:
        """Start fork servers that do not run."""
        self.supervisor_server.keep_alive()
        self.engine_server.keep_alive()

    def launch(self, order: LaunchOrder) -> None:
        """Start a supervisor unless one runs or was just started. A redundant one would end by itself."""
        number, now = order.attempt_id, time.monotonic()
        running = number in self.children or self.folder.attempt(number).running_attempt() is not None
        if running or now - self.launched_at.get(number, float("-inf")) < RELAUNCH_AFTER_S:
            return
        self.launched_at[number] = now
        with errors_logged("launch", attempt=number):  # retried after the next heartbeat
            fork = start_supervisor(self.supervisor_server, self.engine_server, number, order.epoch)
            self.children[number] = fork or self._start_cold(order)
            log.info("supervisor_launched", attempt=number, epoch=order.epoch, warm=fork is not None)

    def _start_cold(self, order: LaunchOrder) -> subprocess.Popen[bytes]:
        lifeline = inherited_lifeline()  # None if the worker runs alone: then a supervisor may outlive the agent
        return subprocess.Popen(
            [sys.executable, "-m", "worker", "supervise", str(order.attempt_id), str(order.epoch)],
            stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=() if lifeline is None else (lifeline,),
        )  # fmt: skip

    def collect(self) -> None:
        """Remove ended children and the folders of attempts without a claim; start a supervisor where one was killed."""
        for number, child in list(self.children.items()):
            status = child.poll()
            if status is not None:
                del self.children[number]
                log.info("supervisor_ended", attempt=number, status=status)
        for attempt in self.folder.attempts():
            if attempt.attempt_id in self.children:
                continue
            if (claim := attempt.saved_claim()) is None:
                attempt.remove_unclaimed()
            elif attempt.running_attempt() is None:
                self.launch(LaunchOrder(attempt_id=attempt.attempt_id, epoch=claim.epoch))

    def fork_fds(self) -> list[int]:
        """File descriptors of forked supervisors, readable when they end: they are not our children, so there is no SIGCHLD."""
        return [child.fileno() for child in self.children.values() if isinstance(child, Fork)]

    def attempts(self) -> list[RunningAttempt]:
        """Attempts with a running supervisor, or with something left to upload and report."""
        rows = [attempt.running_attempt() or attempt.unreported_attempt() for attempt in self.folder.attempts()]
        return [row for row in rows if row is not None]

    def busy_devices(self) -> set[int]:
        """Devices of attempts with a running supervisor."""
        claims = [attempt.saved_claim() for attempt in self.folder.attempts() if attempt.running_attempt() is not None]
        return {index for claim in claims if claim is not None for index in claim.claimed.device_indices}

    def runs(self) -> set[int]:
        """Runs with files of an attempt on this node."""
        claims = [attempt.saved_claim() for attempt in self.folder.attempts()]
        return {claim.claimed.run_id for claim in claims if claim is not None}

    def stuck_devices(self) -> dict[int, str]:
        """Devices that a supervisor could not clean up, with the message."""
        devices = {}
        for attempt in self.folder.attempts():
            message, claim = attempt.stuck(), attempt.saved_claim()
            if message and claim is not None:
                devices.update(dict.fromkeys(claim.claimed.device_indices, message))
        return devices

    def stop(self, order: LaunchOrder | None = None) -> None:
        """Send SIGTERM to one supervisor, or to all: save, report, exit."""
        for attempt in self.folder.attempts():
            if order is None or attempt.attempt_id == order.attempt_id:
                pid = attempt.supervisor_pid()
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):  # it has ended
                        os.kill(pid, signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        """Wait until no supervisor runs: a service manager kills those that outlive the agent."""
        deadline = time.monotonic() + timeout_s
        for child in self.children.values():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("supervisor_left_behind", pid=child.pid)
        for attempt in self.folder.attempts():  # children of an earlier agent
            while (pid := attempt.supervisor_pid()) is not None and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if pid is not None and attempt.attempt_id not in self.children:
                log.warning("supervisor_left_behind", pid=pid)


@contextlib.contextmanager
def errors_logged(action: str, **about: int) -> Iterator[None]:
    """Log a lack of processes, threads, memory, descriptors or disk space instead of raising."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: "can't start new thread"
        log.error("not_done_now", doing=action, detail=f"{type(error).__name__}: {error}"[:500], **about)


class Consumer:
    """The Celery consumer as a child process, restarted when it ends. It writes launch orders to `fd`."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._lifeline = Lifeline()
        self._child: subprocess.Popen[bytes] | None = None
        self._started_at = float("-inf")
        self._partial = b""

    def keep_alive(self) -> None:
        """Start the consumer if it does not run, at most every `CONSUMER_RESTART_S`."""
        now = time.monotonic()
        if (self._child is not None and self._child.poll() is None) or now - self._started_at < CONSUMER_RESTART_S:
            return
        self._started_at = now
        self._child = subprocess.Popen(
            [sys.executable, "-m", "worker", "consume"],
            env={**self._lifeline.environ(), LAUNCH_FD: str(self._write_fd)}, pass_fds=(self._lifeline.fd, self._write_fd),
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def orders(self) -> list[LaunchOrder]:
        """Orders received since the last call."""
        try:
            self._partial += os.read(self.fd, 65536)
        except BlockingIOError:
            return []
        *lines, self._partial = self._partial.split(b"\n")
        pairs = (line.split() for line in lines)
        return [LaunchOrder(attempt_id=int(attempt), epoch=int(epoch)) for attempt, epoch in pairs]

    def stop(self) -> None:
        """End the consumer."""
        self._lifeline.close()
        if self._child is not None:
            self._child.wait()


class NodeAgent:
    """Main loop of the agent (`run`)."""

    def __init__(self, folder: WorkerFolder, node: NodeIdentity) -> None:
        self.api = PlatformApi(node.platform_url, node.node_token)
        self.supervisors = Supervisors(folder)
        self.consumer = Consumer()
        self.catalogue = CatalogueScanner(node.models_roots)
        self.catalogue_requested = False
        self.deletions = Deletions(node.artifact_root)
        self.disks = node_disks(node.artifact_root, folder.path)
        self.throttling = ThrottleMonitor()
        self.platform_away = False
        self.wake = WakePipe()

    def run(self, *, keep_attempts: bool) -> None:
        """Run until SIGTERM; then stop the attempts too, unless `keep_attempts`."""
        next_heartbeat = time.monotonic()
        while not self.wake.stop_requested:
            now = time.monotonic()
            if now >= next_heartbeat:
                next_heartbeat = now + HEARTBEAT_S
                with errors_logged("heartbeat"):
                    self._heartbeat()
            for step in (self.supervisors.collect, self.consumer.keep_alive, self.supervisors.keep_servers_alive):
                with errors_logged(step.__qualname__):
                    step()
            fds = [self.wake.fd, self.consumer.fd, *self.supervisors.fork_fds()]
            select.select(fds, [], [], max(0.0, next_heartbeat - time.monotonic()))
            self.wake.drain()
            with errors_logged("orders"):
                for order in self.consumer.orders():
                    self.supervisors.launch(order)
        self.consumer.stop()
        if not keep_attempts:
            self.supervisors.stop()
            self.supervisors.wait(STOP_TIMEOUT_S)
        self.supervisors.supervisor_server.stop()
        self.supervisors.engine_server.stop()

    def _heartbeat(self) -> None:
        """Report the node, and execute the orders of the reply."""
        catalogue = self.catalogue.unsent(requested=self.catalogue_requested)
        report = NodeHeartbeat(
            devices=device_reports(self.supervisors.busy_devices(), self.supervisors.stuck_devices(), self.throttling),
            attempts=self.supervisors.attempts(),
            catalogue=catalogue,
            deleted=self.deletions.results(),
            disks=self.disks.reports(),
            time=time.time(),
        )
        try:
            orders = self.api.node_heartbeat(report)
        except Unreachable as error:
            if not self.platform_away:
                log.warning("platform_away", detail=str(error)[:200])
            self.platform_away = True
            return
        except (RefusedError, UnacceptableError) as error:
            # The agent continues: attempts still run, and an administrator may admit the node again.
            log.error("heartbeat_refused", detail=str(error)[:500])
            return
        self.platform_away = False
        if catalogue is not None:
            self.catalogue.acknowledge(catalogue)
        self._execute(orders)

    def _execute(self, orders: NodeOrders) -> None:
        self.catalogue_requested = orders.catalogue_wanted
        for order in orders.stop:
            self.supervisors.stop(order)
        for order in orders.unclaimed:
            self.supervisors.launch(order)
        self.deletions.start(orders.delete, self.supervisors.runs())


def run_agent(*, keep_attempts: bool = False) -> int:
    """Main program of the agent. Returns 2 if the node has not joined, or its environment makes every claim fail."""
    watch_lifeline()
    try:
        check_address()  # otherwise every claim would fail
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
