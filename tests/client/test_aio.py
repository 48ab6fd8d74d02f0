"""The asynchronous client does what the other one does, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import inspect
import io

import pytest

from oppo_client import AsyncCheckpoint, AsyncClient, AsyncRun, Checkpoint, Client, Run, RunFailed, WaitTimeout
from tests.client.conftest import QUICK
from tests.client.misbehaving import HANG_UP, misbehaving, said, summary

REWARD = "critic/score/mean"


def drive(live, token, work):
    """Run `work(client)` in an event loop of its own."""

    async def main():
        async with AsyncClient(live.web.url, token, retries=QUICK) as c:
            return await work(c)

    return asyncio.run(main())


@pytest.mark.parametrize(("sync", "twin"), [(Client, AsyncClient), (Run, AsyncRun), (Checkpoint, AsyncCheckpoint)])
def test_both_have_the_same_calls_with_the_same_parameters(sync, twin):
    def calls(kind):
        names = [name for name, value in vars(kind).items() if not name.startswith("_") and inspect.isfunction(value)]
        return {name: list(inspect.signature(getattr(kind, name)).parameters) for name in names}

    assert calls(sync) == calls(twin)


def test_a_run_from_submission_to_deletion(live, token, spec):
    async def work(c):
        run = await c.submit(spec("awaited"), overrides={"seed": 9})
        assert (await run.spec())["seed"] == 9
        assert (await c.validate(spec()))["ok"]
        assert (await run.tag("awaited")).tags == ["awaited"]
        assert [found.id async for found in c.runs("tag:awaited")] == [run.id]
        fork = await run.fork({"seed": 10})
        assert "seed: 10" in await fork.spec_yaml()
        for step in (run.pause, run.resume, run.pin, run.unpin, run.silence, run.refresh):
            await step()
        assert (await run.set_priority(77)).priority == 77
        with pytest.raises(WaitTimeout):
            await run.wait(timeout=0.1)
        assert (await run.cancel()).ended
        with pytest.raises(RunFailed):
            await run.wait(check=True)
        await run.delete()
        assert (await run.restore()) == await c.get(run.id)
        assert (await c.me())["token"]["scope"] == "submit"

    drive(live, token, work)


def test_reading(live, token, two_runs):
    async def work(c):
        runs = [await c.get(run_id) for run_id in two_runs]
        table = await runs[1].metrics([REWARD], x="tokens", frame=False)
        assert len(table["step"]) == 60
        assert [s.step async for s in runs[1].samples(step=30)] == [30]
        assert len([line async for line in runs[1].logs(tail=5, follow=True)]) == 5
        assert next(iter([event["new"] async for event in runs[1].events(["state"])])) == "succeeded"
        assert (await runs[1].timeline(range(10, 12))).steps == [10, 11]
        assert (await c.compare(runs, target_reward=1.0)).table(frame=False)["speedup"][1] > 1
        assert len((await runs[1].plot()).data) == 1
        assert (await runs[1].saving())["steps"] > 0
        assert (await runs[1].usage())["devices"] == 0
        assert "traceEvents" in await runs[1].trace(range(10, 12))
        return await asyncio.gather(*(run.metrics(REWARD, frame=False) for run in runs * 5))

    assert len(drive(live, token, work)) == 10


def test_following_a_log_leaves_the_loop_to_others(live, token, spec):
    async def work(c):
        run = await c.submit(spec("followed", steps=3))
        lines = run.logs(follow=True)
        following = asyncio.ensure_future(anext(lines))
        await asyncio.to_thread(live.start, run.id)
        assert "loading the actor" in str(await asyncio.wait_for(following, 30))
        abandoned = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0)
        abandoned.cancel()
        await asyncio.gather(abandoned, return_exceptions=True)
        assert (await c.get(run.id)).state == "running"

    drive(live, token, work)


def test_watching_leaves_the_loop_to_others(live, token, spec):
    async def work(c):
        run, out = await c.submit(spec("watched", steps=3)), io.StringIO()
        watching = asyncio.create_task(run.watch(out))
        waiting = asyncio.create_task((await c.get(run.id)).wait())
        supervisor, story = await asyncio.to_thread(live.start, run.id)
        await asyncio.to_thread(supervisor.tell, list(story.tell(3)) + story.end())
        await asyncio.to_thread(supervisor.end, "succeeded")
        await asyncio.wait_for(asyncio.gather(watching, waiting), 30)
        assert run.state == waiting.result().state == "succeeded"
        assert "succeeded" in out.getvalue()

    drive(live, token, work)


def test_a_checkpoint_comes_down(live, token, spec, save, tmp_path):
    async def work(c):
        run = await c.submit(spec("saving"))
        supervisor, story = await asyncio.to_thread(live.start, run.id)
        await asyncio.to_thread(supervisor.tell, list(story.tell(2)))
        folder = await asyncio.to_thread(save, supervisor, 2)
        (found,) = await run.checkpoints()
        got = await (await run.checkpoint(2)).download(tmp_path)
        assert (got / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()
        fork = await found.fork({"steps": 30})
        assert fork.summary["forked_from"] == {"run": run.id, "step": 2}

    drive(live, token, work)


def test_it_is_as_stubborn_as_its_twin():
    async def work(url):
        async with AsyncClient(url, "t", retries=QUICK) as c:
            return await c.get(7)

    with misbehaving(HANG_UP, said({}, 503), said(summary())) as server:
        assert asyncio.run(work(server.url)).id == 7
