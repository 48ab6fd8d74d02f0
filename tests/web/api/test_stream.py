"""The live stream, in a real event loop with a real LISTEN connection."""

import asyncio
import json

import pytest
import pytest_asyncio
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import OperationalError, connections, models
from django.test import AsyncClient

from oppo_platform.accounts.api_tokens import create_api_token
from oppo_platform.api import stream as stream_module
from oppo_platform.runs.lifecycle import cancel_run
from oppo_platform.runs.models import Run
from oppo_platform.runs.selectors import summaries
from oppo_platform.telemetry import summary_cache as heads_module
from oppo_platform.telemetry.notifications import Subscription

DEADLINE_S = 20


class Ear:
    """Reads a stream's frames."""

    def __init__(self, reply):
        assert reply.status_code == 200, reply.content
        self.reply = reply
        self.frames = aiter(reply)
        self.rest = ""

    async def frame(self):
        """The next frame as its lines; within a deadline."""
        while "\n\n" not in self.rest:
            self.rest += (await asyncio.wait_for(anext(self.frames), DEADLINE_S)).decode()
        frame, _, self.rest = self.rest.partition("\n\n")
        return frame

    async def event(self):
        """The next event as (id, summary)."""
        while not (frame := await self.frame()).startswith("id:"):
            pass
        id_line, event_line, data_line = frame.split("\n")
        assert event_line == "event: run"
        return id_line.removeprefix("id: "), json.loads(data_line.removeprefix("data: "))

    async def rest_of_it(self):
        """Read on until the stream ends, which raises StopAsyncIteration."""
        while True:
            await self.frame()

    async def close(self):
        await self.frames.aclose()


async def listen(client, query, **headers):
    return Ear(await client.get(f"/api/v1/stream?{query}", headers=headers))


@pytest_asyncio.fixture
async def ada(world):
    """A browser; afterwards the thread that answered it gives its connection back, as the end of a request would do."""
    client = AsyncClient()
    await client.aforce_login(world.people["ada"], backend="allauth.account.auth_backends.AuthenticationBackend")
    yield client
    await sync_to_async(connections.close_all)()


@pytest.mark.asyncio
async def test_a_change_arrives_and_a_client_that_comes_back_gets_what_it_missed(world, ada):
    first, second = [await sync_to_async(world.submit)(name=name) for name in ("one", "two")]
    ear = await listen(ada, f"runs={first.pk},{second.pk}")
    told = [(await ear.event())[1]["id"] for _ in range(2)]
    assert told == [first.pk, second.pk]
    await sync_to_async(cancel_run)(first.pk, "user:ada")
    event_id, summary = await ear.event()
    assert (summary["id"], summary["state"], summary["reason"]) == (first.pk, "cancelled", "Cancelled by ada.")
    assert event_id == f"{first.pk}:{summary['cursor']},{second.pk}:1"
    await ear.close()

    await sync_to_async(cancel_run)(second.pk, "user:ada")
    for again in (
        await listen(ada, f"runs={first.pk},{second.pk}", **{"Last-Event-ID": event_id}),
        await listen(ada, f"runs={first.pk},{second.pk}&cursor={event_id}"),
    ):
        _, summary = await again.event()
        assert (summary["id"], summary["state"]) == (second.pk, "cancelled")
        await again.close()


@pytest.mark.asyncio
async def test_silence_is_broken_by_comments_and_nothing_is_repeated(world, ada, monkeypatch):
    monkeypatch.setattr(stream_module, "PING_S", 0.05)
    run = await sync_to_async(world.submit)()
    ear = await listen(ada, f"runs={run.pk}")
    frames = [await ear.frame() for _ in range(5)]
    assert [frame.split(":")[0] for frame in frames] == ["retry", "id", "", "", ""]
    await ear.close()


@pytest.mark.asyncio
async def test_a_burst_of_changes_is_one_event(world, ada):
    run = await sync_to_async(world.submit)()
    ear = await listen(ada, f"runs={run.pk}")
    await ear.event()

    def burst():
        from oppo_platform.notify import run_changed

        for _ in range(50):
            Run.objects.filter(pk=run.pk).update(cursor=models.F("cursor") + 1)
            run_changed(run.pk)

    await sync_to_async(burst)()
    seen = []
    while not seen or seen[-1] < 51:
        seen.append((await ear.event())[1]["cursor"])
    assert len(seen) <= 5
    await ear.close()


@pytest.mark.asyncio
async def test_stream_ends_after_a_logout_or_a_lost_membership(world, ada, monkeypatch):
    monkeypatch.setattr(stream_module, "PING_S", 0.05)
    run = await sync_to_async(world.submit)()
    ear = await listen(ada, f"runs={run.pk}")
    await ear.event()
    await sync_to_async(world.people["ada"].memberships.all().delete)()
    with pytest.raises(StopAsyncIteration):
        await ear.rest_of_it()


@pytest.mark.asyncio
async def test_strangers_and_nonsense(world, ada):
    run = await sync_to_async(world.submit)()
    assert (await AsyncClient().get(f"/api/v1/stream?runs={run.pk}")).status_code == 401
    assert (await ada.get("/api/v1/stream?runs=")).status_code == 422
    assert (await ada.get(f"/api/v1/stream?runs={run.pk}&cursor=x")).status_code == 404
    assert (await ada.post(f"/api/v1/stream?runs={run.pk}")).status_code == 405


@pytest.mark.asyncio
async def test_a_run_that_many_watch_is_read_once_a_change(world, ada, monkeypatch):
    reads = []
    monkeypatch.setattr(heads_module, "summaries", lambda: reads.append(1) or summaries())
    run = await sync_to_async(world.submit)()
    ears = [await listen(ada, f"runs={run.pk}") for _ in range(12)]
    for ear in ears:
        await ear.event()
    reads.clear()
    await sync_to_async(cancel_run)(run.pk, "user:ada")
    assert {(await ear.event())[1]["state"] for ear in ears} == {"cancelled"}
    assert 1 <= len(reads) <= 4, "a cancel tells at most a few changes"
    for ear in ears:
        await ear.close()


@pytest.mark.asyncio
async def test_a_change_during_a_read_is_read_again(world, ada, monkeypatch):
    run = await sync_to_async(world.submit)()
    heads, load = heads_module.SummaryCache(), heads_module._load

    def change_after(run_ids):
        found = load(run_ids)
        Run.objects.filter(pk=run.pk).update(cursor=9)
        connections.close_all()
        heads.forget(run.pk)  # as the notification does
        return found

    monkeypatch.setattr(heads_module, "_load", change_after)
    assert [head.cursor for head in await heads.get([run.pk])] == [run.cursor]
    monkeypatch.setattr(heads_module, "_load", load)
    assert [head.cursor for head in await heads.get([run.pk, 10**6])] == [9]
    await sync_to_async(Run.objects.filter(pk=run.pk).update)(cursor=10)
    assert [head.cursor for head in await heads.get([run.pk])] == [9], "nothing was notified: what is known is told"
    heads.forget(run.pk)
    assert [head.cursor for head in await heads.get([run.pk])] == [10]


@pytest.mark.asyncio
async def test_reading_fails_for_those_who_asked_and_for_nobody_later(world, ada, monkeypatch):
    run = await sync_to_async(world.submit)()
    heads, load = heads_module.SummaryCache(), heads_module._load

    def away(run_ids):
        raise OperationalError("the database is away")

    monkeypatch.setattr(heads_module, "_load", away)
    told = await asyncio.gather(heads.get([run.pk]), heads.get([run.pk]), return_exceptions=True)
    assert [type(error) for error in told] == [OperationalError] * 2
    monkeypatch.setattr(heads_module, "_load", load)
    assert [head.run_id for head in await heads.get([run.pk])] == [run.pk]


@pytest.mark.asyncio
async def test_a_stream_is_one_request_of_the_tokens_minute(world, ada, settings, minute):
    settings.OPPO_API_RATE = 2
    run = await sync_to_async(world.submit)()
    token = (await sync_to_async(create_api_token)(world.people["ada"], world.team, "notebook")).text
    client, bearer = AsyncClient(), {"Authorization": f"Bearer {token}"}
    for left in ("1", "0"):
        ear = await listen(client, f"runs={run.pk}", **bearer)
        assert ear.reply.headers["RateLimit-Remaining"] == left
        await ear.close()
    over = await client.get(f"/api/v1/stream?runs={run.pk}", headers=bearer)
    assert (over.status_code, over.headers["RateLimit-Remaining"]) == (429, "0")
    await (await listen(ada, f"runs={run.pk}")).close()


@pytest.mark.asyncio
async def test_an_open_stream_holds_no_database_connection(world, ada):
    """Otherwise a dozen open tabs would use up the pool."""
    run = await sync_to_async(world.submit)()
    async with ThreadSensitiveContext():  # a thread of its own, as each request under ASGI has
        ear = await listen(ada, f"runs={run.pk}")
        await ear.event()
        assert await sync_to_async(lambda: connections["default"].connection)() is None
        await ear.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("change_first", [True, False])
async def test_a_disconnect_ends_the_wait_whenever_a_change_arrives_beside_it(turns, change_first):
    """Otherwise the stream of a client that is gone keeps its thread and reads its runs for ever."""
    subscription = Subscription([1])
    waiting = asyncio.create_task(subscription.changed(DEADLINE_S))
    await asyncio.sleep(0)
    first, second = (subscription.wake, waiting.cancel) if change_first else (waiting.cancel, subscription.wake)
    first()
    for _ in range(turns):
        await asyncio.sleep(0)
    ended_before = waiting.done()
    second()
    await asyncio.wait([waiting])
    assert waiting.cancelled() != (change_first and ended_before)
