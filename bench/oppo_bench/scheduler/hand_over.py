"""Time from the commit that frees a run's GPUs to the next launch order in the broker."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import click

from oppo_bench.scheduler.load import begin_all, generator

if TYPE_CHECKING:
    from oppo_bench.document import Result

ENDED_A_CYCLE = 0.05  # of the running runs
PATIENCE_S = 30
ORDER_WITHIN_S = 5.0  # two of the scheduler's own cycles


def end_some(chance: random.Random, count: int | None = None) -> None:
    """Let running runs succeed: `count` of them, or a twentieth."""
    from oppo_contract import wire
    from oppo_platform.runs.attempts import finish
    from oppo_platform.runs.models import Attempt, AttemptState

    running = list(Attempt.objects.filter(state=AttemptState.RUNNING).order_by("pk").values_list("pk", "epoch"))
    for attempt_id, epoch in chance.sample(running, count or max(1, round(ENDED_A_CYCLE * len(running)))):
        finish(attempt_id, wire.Outcome(epoch=epoch, outcome="succeeded", exit_code=0, reason=""))


def freed_to_dispatch(repetitions: int, seed: int) -> list[Result]:
    """Free GPUs one by one, with a separate scheduler process.

    Freed GPUs may rightly stay free because the run in front waits for more of them: these cases are counted.
    """
    from oppo_bench.document import Result

    taken: list[float] = []
    chance, kept_back = generator(seed), 0
    with scheduler_process(), Broker() as broker:
        broker.drain(settle_s=3.0)
        while len(taken) < repetitions:
            value = broker.free_one(chance)
            if value is not None:
                taken.append(value)
                continue
            kept_back += 1  # one of several GPUs that the run in front waits for
            if kept_back > repetitions:
                raise click.ClickException("Launch orders hardly ever come: nothing that waits fits what is freed.")
    return [
        Result.tail("freed_to_dispatch_ms/p95", "ms", taken), Result.of("freed_to_dispatch_ms", "ms", taken),
        Result.of("freed_and_kept_back", "times", [kept_back]),
    ]  # fmt: skip


class Broker:
    """The queues of all nodes."""

    def __enter__(self) -> Self:
        import redis
        from django.conf import settings

        from oppo_platform.cluster.models import Node

        self._client: Any = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=PATIENCE_S)
        self._queues = list(Node.objects.order_by("pk").values_list("queue", flat=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def drain(self, settle_s: float) -> None:
        """Remove orders until none arrives for a while."""
        while self._client.brpop(self._queues, timeout=settle_s) is not None:
            pass

    def free_one(self, chance: random.Random) -> float | None:
        """Let one run end: milliseconds until the next order; None if none comes."""
        begin_all(chance)
        end_some(chance, 1)
        start = time.perf_counter()
        if self._client.brpop(self._queues, timeout=ORDER_WITHIN_S) is None:
            return None
        taken = 1e3 * (time.perf_counter() - start)
        self.drain(settle_s=0.3)
        return taken


@contextmanager
def scheduler_process() -> Iterator[subprocess.Popen[bytes]]:
    """The scheduler as a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "oppo_cli", "scheduler"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)
