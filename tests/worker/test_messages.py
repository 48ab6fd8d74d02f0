"""Launch orders over a real broker: no duplicate starts; the consumer may be killed at any time."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from celery import Celery

from tests.processes import gone


@pytest.fixture
def send(bench: Any, redis_url: str) -> Any:
    """Send a launch order to the node's queue."""
    queue = f"oppo.test.{bench.home.name}"
    bench.folder.save_identity(bench.folder.identity().model_copy(update={"queue": queue, "broker_url": redis_url}))
    app = Celery(broker=redis_url, set_as_current=False)
    app.conf.task_ignore_result = True
    return lambda attempt: app.send_task("oppo.launch", kwargs={"attempt_id": attempt, "epoch": 1}, queue=queue)


def consumer_of(agent: Any) -> psutil.Process | None:
    """The agent's Celery consumer."""
    below = psutil.Process(agent.pid).children(recursive=True)
    alive = [process for process in below if process.status() != psutil.STATUS_ZOMBIE]
    return next((process for process in alive if "consume" in process.cmdline()), None)


@pytest.mark.full
def test_the_same_message_three_times_starts_one_engine(bench: Any, tools: Any, send: Any) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.02)
    agent = bench.start("agent")
    for _ in range(3):
        send(1)
    tools.eventually(lambda: attempt.running, "the order to arrive")
    for _ in range(3):  # and once more, while it runs
        send(1)
    beats = len(bench.platform.node_beats)
    tools.eventually(lambda: len(bench.platform.node_beats) > beats + 2)
    assert bench.platform.requests.count("attempts/1/claim") == 1
    assert len(bench.engines()) == 1
    agent.terminate()
    agent.wait()
    assert attempt.outcome["outcome"] == "preempted"


@pytest.mark.full
def test_killed_consumer_is_replaced_and_engines_continue(bench: Any, tools: Any, send: Any) -> None:
    first = bench.attempt(1, steps=100_000, step_s=0.02)
    second = bench.attempt(2, steps=3)
    agent = bench.start("agent")
    send(1)
    tools.eventually(lambda: first.running, "the first order to arrive")
    [engine] = bench.engines()
    killed = consumer_of(agent)
    assert killed is not None
    killed.kill()
    # A message that the broker was just handing to the dead one may be lost with it: heartbeats carry the same order.
    tools.eventually(lambda: (found := consumer_of(agent)) is not None and found.pid != killed.pid, "the next consumer")
    send(2)
    tools.eventually(lambda: second.outcome, "the second order to be heard")
    assert bench.engines() == [engine]


@pytest.mark.full
def test_a_killed_agent_ends_its_consumer_and_the_next_agent_takes_over(bench: Any, tools: Any, send: Any) -> None:
    """Without the agent a supervisor continues; here both depend on the bench's lifeline."""
    attempt = bench.attempt(steps=100_000, step_s=0.02)
    agent = bench.start("agent")
    send(1)
    tools.eventually(lambda: attempt.running, "the order to arrive")
    consumer = consumer_of(agent)
    [engine] = bench.engines()
    agent.kill()
    agent.wait()
    tools.eventually(lambda: gone(consumer), "the consumer to end")
    beats = len(bench.platform.node_beats)
    again = bench.start("agent")
    tools.eventually(lambda: len(bench.platform.node_beats) > beats + 1)
    assert bench.platform.node_beats[-1]["attempts"] == [{"attempt_id": 1, "epoch": 1}]
    assert bench.engines() == [engine]
    assert bench.platform.requests.count("attempts/1/claim") == 1
    again.terminate()
    again.wait()
    assert attempt.outcome["outcome"] == "preempted"
