"""`runs/{id}/logs?after=N&wait=S`: the next lines as soon as they are written, in a real event loop with a real LISTEN."""

import asyncio
import json

import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import AsyncClient

from oppo_platform.accounts.api_tokens import create_api_token
from oppo_platform.api import log_long_poll
from oppo_platform.telemetry.models import LogLine
from oppo_platform.telemetry.notifications import Subscription, feed

DEADLINE_S = 20


def written(worker, attempt_id, *lines, seq=1):
    told = {"producer": "engine", "seq": seq, "time": 1_700_000_000.5, "stream": "stderr", "lines": list(lines)}
    assert worker.send_events(attempt_id, [{"kind": "log", **told}]).status_code == 200


class Scene:
    """A run that trains and has written nothing yet."""

    def __init__(self, world):
        self.world, self.worker = world, world.worker()
        self.run, self.attempt_id = world.start(self.worker)
        self.path = f"/api/v1/runs/{self.run.pk}/logs"

    async def write(self, *lines, seq=1):
        await sync_to_async(written)(self.worker, self.attempt_id, *lines, seq=seq)

    async def end(self):
        body = {"epoch": 1, "outcome": "succeeded", "reason": "All steps are done."}
        assert (await sync_to_async(self.worker.attempt)(self.attempt_id, "outcome", body)).status_code == 200


class Ears:
    """Counts who has looked and now waits to be told."""

    def __init__(self, monkeypatch):
        self.count, self.came = 0, asyncio.Condition()
        changed = Subscription.changed

        async def counted(subscription, within_s):
            async with self.came:
                self.count += 1
                self.came.notify_all()
            return await changed(subscription, within_s)

        monkeypatch.setattr(Subscription, "changed", counted)

    async def wait_for(self, count):
        async with self.came:
            await asyncio.wait_for(self.came.wait_for(lambda: self.count >= count), DEADLINE_S)


@pytest_asyncio.fixture
async def scene(world):
    yield await sync_to_async(Scene)(world)
    await sync_to_async(connections.close_all)()


@pytest_asyncio.fixture
async def vic(world):
    """A viewer's browser."""
    client = AsyncClient()
    await client.aforce_login(world.people["vic"], backend="allauth.account.auth_backends.AuthenticationBackend")
    return client


@pytest.fixture
def ears(monkeypatch):
    """Whoever does not hear comes too late."""
    monkeypatch.setattr(log_long_poll, "LOOK_EVERY_S", 1000.0)
    return Ears(monkeypatch)


async def told(client, scene, **query):
    """The reply's page; within a deadline."""
    reply = await client.get(scene.path, {"after": 0, "wait": DEADLINE_S, **query})
    assert reply.status_code == 200
    if not reply.streaming:
        return reply.json()
    parts = [part async for part in reply]
    return json.loads(b"".join(parts))


def following(client, scene, **query):
    return asyncio.create_task(asyncio.wait_for(told(client, scene, **query), 2 * DEADLINE_S))


def texts(page):
    return [line["text"] for line in page["lines"]]


@pytest.mark.asyncio
async def test_a_line_that_is_written_meanwhile_comes_in_the_same_reply_to_all_who_wait(scene, vic, ears):
    waiting = [following(vic, scene) for _ in range(30)]  # more than the database's pool has connections
    picky = following(vic, scene, stream="stderr", q="second")
    await ears.wait_for(31)
    await scene.write("first")
    pages = await asyncio.gather(*waiting)
    assert [texts(page) for page in pages] == [["first"]] * 30
    assert {(page["next"] > 0, page["earlier"], page["ended"]) for page in pages} == {(True, False, False)}
    assert not picky.done()
    await scene.write("second", seq=2)
    assert texts(await picky) == ["second"]
    assert texts(await told(vic, scene, after=pages[0]["next"])) == ["second"], "what is there is told at once"


@pytest.mark.asyncio
async def test_the_wait_ends_with_the_run(scene, vic, ears):
    waiting = following(vic, scene)
    await ears.wait_for(1)
    await scene.end()
    page = await waiting
    while page["lines"]:  # how it ended
        page = await told(vic, scene, after=page["next"])
    assert page["ended"]
    assert await told(vic, scene, after=page["next"]) == page, "an ended run keeps nobody waiting"


@pytest.mark.asyncio
async def test_long_poll_times_out_and_recovers_from_lost_notifications(scene, vic, monkeypatch):
    assert await told(vic, scene, wait=0.3) == {"lines": [], "next": 0, "earlier": False, "ended": False}
    assert (await told(vic, scene, after=7, wait=0.3))["next"] == 7

    monkeypatch.setattr(log_long_poll, "LOOK_EVERY_S", 0.05)
    ears = Ears(monkeypatch)
    waiting = following(vic, scene)
    await ears.wait_for(1)
    line = {"attempt_id": scene.attempt_id, "stream": "stderr", "text": "unheard", "time": scene.world.clock.now()}
    await LogLine.objects.acreate(**line)
    assert texts(await waiting) == ["unheard"]


@pytest.mark.asyncio
async def test_disconnected_client_ends_its_long_poll(scene, vic, ears):
    waiting = following(vic, scene)
    await ears.wait_for(1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not feed()._subscriptions
    assert feed()._listener is None


@pytest.mark.asyncio
async def test_long_poll_returns_no_lines_after_a_lost_permission(scene, vic, ears):
    waiting = following(vic, scene)
    await ears.wait_for(1)
    await scene.world.people["vic"].memberships.all().adelete()
    await scene.write("a secret")
    page = await waiting
    assert (page["lines"], page["ended"]) == ([], False)
    assert (await vic.get(scene.path, {"after": 0, "wait": 1})).status_code == 404


@pytest.mark.asyncio
async def test_strangers_and_nonsense(scene, vic, world, settings, minute):
    eve = AsyncClient()
    await eve.aforce_login(world.people["eve"], backend="allauth.account.auth_backends.AuthenticationBackend")
    assert (await eve.get(scene.path, {"after": 0, "wait": 20})).status_code == 404
    assert (await AsyncClient().get(scene.path, {"after": 0, "wait": 20})).status_code == 401
    for query in ({"wait": 1}, {"before": 5, "wait": 1}, *({"after": 0, "wait": wait} for wait in (-1, 26, "nan", "x"))):
        assert (await vic.get(scene.path, query)).status_code == 422, query
    settings.OPPO_API_RATE = 1
    token = (await sync_to_async(create_api_token)(world.people["vic"], world.team, "notebook", scope="read")).text
    bearer = {"Authorization": f"Bearer {token}"}
    reply = await vic.get(scene.path, {"after": 0, "wait": 0.1}, headers=bearer)
    assert reply.headers["RateLimit-Remaining"] == "0"
    assert json.loads(b"".join([part async for part in reply]))["lines"] == []
    assert (await vic.get(scene.path, {"after": 0, "wait": 20}, headers=bearer)).status_code == 429
