"""What lies between simulated machines: an agenda on one virtual clock, a bus, and calls that get lost, doubled or late."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from django.db import IntegrityError, connection
from django.http import HttpRequest
from kombu.exceptions import OperationalError

from oppo_contract import wire
from oppo_contract.events import Event
from oppo_platform.api.auth import AttemptAuth
from oppo_platform.api.worker import STALE_EPOCH
from oppo_platform.clock import ManualClock
from oppo_platform.cluster.models import Node
from oppo_platform.runs import attempts
from oppo_platform.telemetry.ingest import SequenceGapError, ingest
from oppo_platform.usecases import node_heartbeat
from worker.platform_api import GapError, RefusedError, Unreachable

Reply = TypeVar("Reply")
# Longest time that a request or an answer is on its way; the agent's and the supervisor's time-out.
LONGEST_DELAY_S = 3.0


class Crash(BaseException):
    """The process that was at work is gone, in the middle of what it did. No error handling may catch it."""


class Agenda:
    """Everything that is going to happen, in the order of the virtual clock."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.start = clock.now()
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return (self.clock.now() - self.start).total_seconds()

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        """Let something happen in so many virtual seconds."""
        if seconds > 0:  # the clock counts in microseconds: who waits for less would wait for ever
            seconds = max(seconds, 0.001)
        heapq.heappush(self._heap, (self.now + seconds, next(self._count), act))

    def pop(self) -> Callable[[], object]:
        """Go on to what happens next; the caller does it."""
        at, _, act = heapq.heappop(self._heap)
        self.clock.advance(max(0.0, at - self.now))
        return act


@dataclass
class Faults:
    """How likely it is, for each call and message, that it goes wrong in one of the ways it can."""

    lost: float = 0.0
    reply_lost: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    crash: float = 0.0


@dataclass
class Network:
    """Calls from the nodes to the platform. `down`: nobody answers."""

    agenda: Agenda
    rng: Random
    faults: Faults = field(default_factory=Faults)
    down: bool = False

    def call(self, reachable: bool, serve: Callable[[], Reply]) -> Reply:
        """One call as its caller sees it.

        Raises:
            Unreachable: nobody answered; it may have been served all the same, or will be. RefusedError, GapError: the answer.
        """
        roll, faults = self.rng.random(), self.faults
        if self.down or not reachable or roll < faults.lost:
            raise Unreachable("the request was lost")
        roll -= faults.lost
        if roll < faults.late:
            self.agenda.after(self.rng.uniform(0.1, LONGEST_DELAY_S), lambda: self._served_unheard(serve))
            raise Unreachable("the request is late")
        roll -= faults.late
        if roll < faults.reply_lost:
            self._served_unheard(serve)
            raise Unreachable("the reply was lost")
        roll -= faults.reply_lost
        if roll < faults.twice:
            self._served_unheard(serve)  # whoever repeated the request, the caller gets the second answer
        return self._serve(serve)

    def _served_unheard(self, serve: Callable[[], object]) -> None:
        if self.down:
            return
        try:
            self._serve(serve)
        except (RefusedError, GapError, Unreachable):
            return

    def _serve(self, serve: Callable[[], Reply]) -> Reply:
        """Let a web process serve the call; one may die in the middle of it, between any two statements."""
        after = self.rng.randint(1, 12) if self.rng.random() < self.faults.crash else None
        try:
            with crashing(after):
                return serve()
        except Crash:
            raise Unreachable("the web process died") from None
        except attempts.AttemptRefused as refused:
            raise RefusedError(refused.detail, refused.reason) from refused
        except SequenceGapError as gap:
            raise GapError(wire.Gap(detail=str(gap), expected_seq=gap.expected_seq)) from gap
        except IntegrityError as error:
            told = getattr(error.__cause__, "diag", None)
            if told is None or told.constraint_name != STALE_EPOCH:
                raise
            raise RefusedError(str(error), "stale_epoch") from error


@contextmanager
def crashing(after: int | None) -> Iterator[None]:
    """Die before the statement of that number; None: not at all."""
    left = -1 if after is None else after

    def execute(run: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash
        return run(sql, params, many, context)

    with connection.execute_wrapper(execute):
        yield


class Writes:
    """Notes whether anything was written to the database; a wrapper of its statements."""

    def __init__(self) -> None:
        self.seen = False

    def __call__(self, run: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        """Let the statement pass."""
        self.seen = self.seen or not sql.startswith(("SELECT", "SAVEPOINT", "RELEASE", "\n    SELECT"))
        return run(sql, params, many, context)


class Serving:
    """The worker's interface, as `api/worker.py` serves it, past HTTP. Every function is served by a web process."""

    @staticmethod
    def node_heartbeat(node_id: int, told: wire.NodeHeartbeat) -> wire.NodeOrders:
        """The agent's report."""
        orders = node_heartbeat.heartbeat(node_id, told)
        node_heartbeat.fence_orphans(node_id, {running.attempt_id for running in told.attempts})
        return orders

    @staticmethod
    def claim(node_id: int, attempt_id: int, epoch: int, address: wire.Address) -> wire.Claimed:
        """Once, for each node that the attempt is allocated to."""
        return attempts.claim(Node.objects.get(pk=node_id), attempt_id, epoch, address)

    @staticmethod
    def rank_of(attempt_id: int, node_id: int, token: str) -> int:
        """For which rank of the attempt a supervisor with this token speaks. Asked once: nothing about a token ever changes."""
        own = AttemptAuth().authenticate(HttpRequest(), token)
        assert own is not None, f"the token for attempt {attempt_id} is nobody's"
        assert (own.attempt_id, own.node.pk) == (attempt_id, node_id), f"attempt {attempt_id} has the token of {own}"
        return own.rank

    @staticmethod
    def attempt_heartbeat(attempt_id: int, told: wire.AttemptHeartbeat, rank: int) -> wire.AttemptOrders:
        """Renews the lease, brings signals."""
        return attempts.heartbeat(attempt_id, told, rank)

    @staticmethod
    def events(attempt_id: int, producer: str, batch: list[Event], rank: int) -> int:
        """Telemetry, exactly once."""
        return ingest(attempt_id, producer, batch, rank)

    @staticmethod
    def checkpoint(attempt_id: int, told: wire.CheckpointRegistration, rank: int) -> None:
        """The run resumes from here from now on."""
        attempts.register_checkpoint(attempt_id, told, rank)

    @staticmethod
    def outcome(attempt_id: int, told: wire.Outcome, rank: int) -> None:
        """The engine has ended and the devices are free."""
        attempts.finish(attempt_id, told, rank)


@dataclass
class Bus:
    """The broker, seen from both sides: what is sent reaches a node's queue never, once, thrice, late or out of order."""

    agenda: Agenda
    rng: Random
    faults: Faults = field(default_factory=Faults)
    down: bool = False
    consumers: dict[str, Callable[[wire.LaunchOrder], None]] = field(default_factory=dict)

    def send_task(self, name: str, kwargs: dict[str, int], queue: str, retry: bool, expires: float) -> None:
        """As `Celery.send_task`. Raises kombu's OperationalError while the broker is down."""
        if self.down:
            raise OperationalError("the broker is down")
        order = wire.LaunchOrder.model_validate(kwargs)
        copies = 3 if self.rng.random() < self.faults.twice else 1
        for _ in range(copies):
            if self.rng.random() < self.faults.lost:
                continue
            longest = expires if self.rng.random() < self.faults.late else 0.2
            self.agenda.after(self.rng.uniform(0.0, longest), lambda: self._deliver(queue, order))

    def _deliver(self, queue: str, order: wire.LaunchOrder) -> None:
        if not self.down:
            self.consumers[queue](order)
