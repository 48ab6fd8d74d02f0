"""Launch orders that are repeated, lost or never heard, and a cancel at any moment of a run's life, with everything real."""

from __future__ import annotations

from typing import Any

import psutil
import psycopg
import pytest
import redis
from celery import Celery

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]


@pytest.fixture(scope="module")
def servers(platform: Any) -> dict[str, str]:
    """The environment of the platform's own processes: the URLs of its database and its broker."""
    return platform.find("oppo_cli scheduler")[0].environ()


def rows(servers: dict[str, str], sql: str, *values: object) -> list[tuple[Any, ...]]:
    """What the platform's database answers."""
    with psycopg.connect(servers["DATABASE_URL"]) as connection:
        return connection.execute(sql, values).fetchall()


def attempts(servers: dict[str, str], run_id: int) -> list[tuple[Any, ...]]:
    """The run's attempts: (id, epoch)."""
    return rows(servers, "SELECT id, epoch FROM runs_attempt WHERE run_id = %s ORDER BY epoch", run_id)


def engines(platform: Any) -> set[int]:
    """The processes of the engines that train."""
    return {process.pid for process in platform.find("-m oppo_core", "--spec")}


def test_an_order_that_comes_three_times_more_starts_nothing(platform: Any, servers: dict[str, str], tools: Any) -> None:
    run_id = platform.submit(tools.tiny_spec("repeated orders", steps=60))
    platform.wait_for_step(run_id, 2)
    running = engines(platform)
    [(attempt_id, epoch)] = attempts(servers, run_id)
    [(queue,)] = rows(servers, "SELECT queue FROM scheduling_dispatch WHERE attempt_id = %s", attempt_id)
    consumer = redis.from_url(servers["REDIS_URL"])
    for _ in range(3):
        sender = Celery(broker=servers["REDIS_URL"], set_as_current=False)
        sender.send_task("oppo.launch", kwargs={"attempt_id": attempt_id, "epoch": epoch}, queue=queue)
    tools.eventually(lambda: consumer.llen(queue) == 0, "the orders to be heard")
    run = platform.wait_for_end(run_id)
    assert run["state"] == "succeeded", run
    assert engines(platform) <= running
    assert attempts(servers, run_id) == [(attempt_id, epoch)]
    assert platform.steps_of(run_id) == list(range(1, 61))


def test_orders_that_the_broker_forgot_come_by_heartbeat(platform: Any, servers: dict[str, str], tools: Any) -> None:
    broker = redis.from_url(servers["REDIS_URL"])
    consumers = platform.find("worker consume")
    assert consumers
    for consumer in consumers:
        consumer.suspend()  # so that orders lie in the broker until they are flushed away
    try:
        ids = [platform.submit(tools.tiny_spec(f"flushed {number}", steps=5)) for number in range(2)]
        broker.flushall()
        for run_id in ids:
            assert platform.wait_for_end(run_id)["state"] == "succeeded"
            broker.flushall()
    finally:
        for consumer in consumers:
            consumer.resume()
    after = platform.submit(tools.tiny_spec("after the flush", steps=5))
    assert platform.wait_for_end(after)["state"] == "succeeded"
    assert all(len(attempts(servers, run_id)) == 1 for run_id in [*ids, after])


@pytest.mark.parametrize("words", ["worker consume", "worker agent"])
def test_killing_celery_or_its_parent_stops_no_engine(platform: Any, servers: dict[str, str], words: str, tools: Any) -> None:
    run_id = platform.submit(tools.tiny_spec(f"without {words}", steps=100_000))
    platform.wait_for_step(run_id, 2)
    running = engines(platform)
    killed = platform.find(words)
    for process in killed:
        process.kill()
    before = platform.run(run_id)["step"]
    platform.wait_for_step(run_id, before + 5)
    assert all(psutil.pid_exists(pid) for pid in running)
    tools.eventually(lambda: {p.pid for p in platform.find(words)} - {p.pid for p in killed}, f"{words} to be started again")
    before = platform.run(run_id)["step"]
    platform.wait_for_step(run_id, before + 5)
    # Not looked for below the platform: a supervisor whose agent was killed has another parent.
    assert all(psutil.pid_exists(pid) for pid in running)
    assert len(attempts(servers, run_id)) == 1
    assert platform.http.post(f"runs/{run_id}/cancel").status_code == 200
    assert platform.wait_for_end(run_id)["state"] == "cancelled"
    steps = platform.steps_of(run_id)
    assert steps == list(range(1, len(steps) + 1))
    after = platform.submit(tools.tiny_spec(f"after {words} died", steps=5))
    assert platform.wait_for_end(after)["state"] == "succeeded"


def test_a_cancel_in_every_state(platform: Any, servers: dict[str, str], tools: Any) -> None:
    def call(run_id: int, verb: str) -> None:
        reply = platform.http.post(f"runs/{run_id}/{verb}")
        assert reply.status_code == 200, reply.text

    def state(run_id: int, *wanted: str) -> None:
        tools.eventually(lambda: platform.run(run_id)["state"] in wanted, f"run {run_id} to be {wanted}")

    first = platform.submit(tools.tiny_spec("cancelled when it runs", steps=100_000))
    waiting = platform.submit(tools.tiny_spec("cancelled in the queue", steps=100_000))
    call(waiting, "cancel")
    platform.wait_for_step(first, 1)
    call(first, "cancel")
    early = []
    for wanted in (("allocated", "starting", "running"), ("starting", "running")):
        early.append(platform.submit(tools.tiny_spec(f"cancelled when {wanted[0]}", steps=100_000)))
        state(early[-1], *wanted)
        call(early[-1], "cancel")
        platform.wait_for_end(early[-1])
    held = []
    for pausing in (True, False):
        held.append(platform.submit(tools.tiny_spec("cancelled when it pauses", steps=100_000)))
        platform.wait_for_step(held[-1], 1)
        call(held[-1], "pause")
        if not pausing:
            state(held[-1], "paused")
        call(held[-1], "cancel")
        platform.wait_for_end(held[-1])
    for run_id in (first, waiting, *early, *held):
        assert platform.wait_for_end(run_id)["state"] == "cancelled", platform.run(run_id)
    tools.eventually(lambda: not engines(platform), "every engine to end")
    assert not rows(servers, "SELECT id FROM scheduling_allocation WHERE released_at IS NULL")
    assert platform.wait_for_end(platform.submit(tools.tiny_spec("after all cancels", steps=5)))["state"] == "succeeded"
