"""A small world for the web tests: people, a project, nodes that join over HTTP, and the scheduler's hand on the clock."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.contrib.contenttypes.management import create_contenttypes
from django.core.cache import cache
from django.db.models.signals import post_migrate
from django.test import Client

START = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
TOKENIZER = "a" * 64


def tiny_spec(**changes: Any) -> dict[str, Any]:
    """A spec that any node with the prompts `letters` can run."""
    tiny = {"tiny": {"context": 1024}}
    spec = {
        "name": "demo",
        "steps": 100,
        "models": {"actor": tiny, "reward": {"rule": "letters:score"}},
        "data": {"prompts": "letters"},
        "retries": {"backoff_s": 0},
    }
    return {**spec, **changes}


class Worker:
    """What an agent and its supervisors say over HTTP."""

    def __init__(self, name: str, join_token: str) -> None:
        self.client = Client()
        self.name = name
        told = {"name": name, "hostname": "host", "cpus": 2, "memory_bytes": 1}
        self.joined = self.post("join", told, join_token).json()
        self.token = self.joined["node_token"]
        self.attempt_tokens: dict[int, str] = {}

    def post(self, path: str, body: Any, token: str) -> Any:
        """One call; `body` as JSON unless it is text already."""
        text = body if isinstance(body, str) else json.dumps(body)
        headers = {"Authorization": f"Bearer {token}"}
        return self.client.post(f"/api/worker/v1/{path}", text, content_type="application/json", headers=headers)

    def heartbeat(self, devices: int = 1, kind: str = "cpu", attempts: Any = (), catalogue: Any = None) -> dict[str, Any]:
        """The agent's report; returns its orders."""
        report = [{"index": i, "kind": kind, "model": "m", "memory_bytes": 16 << 30} for i in range(devices)]
        running = [{"attempt_id": a, "epoch": e} for a, e in attempts]
        reply = self.post("heartbeat", {"devices": report, "attempts": running, "catalogue": catalogue}, self.token)
        assert reply.status_code == 200, reply.content
        return reply.json()

    def claim(self, attempt_id: int, epoch: int = 1) -> Any:
        """Claim; remembers the attempt's token when it worked."""
        reply = self.post(f"attempts/{attempt_id}/claim", {"epoch": epoch}, self.token)
        if reply.status_code == 200:
            self.attempt_tokens[attempt_id] = reply.json()["attempt_token"]
        return reply

    def attempt(self, attempt_id: int, call: str, body: Any) -> Any:
        """A supervisor's call."""
        return self.post(f"attempts/{attempt_id}/{call}", body, self.attempt_tokens[attempt_id])

    def send_events(self, attempt_id: int, events: list[dict[str, Any]], producer: str = "engine") -> Any:
        """A batch of one producer."""
        return self.attempt(attempt_id, "events", {"producer": producer, "events": events})


def catalogue_entry(id: str, kind: str = "model", **facts: Any) -> dict[str, Any]:
    """An entry of a catalogue; models share a tokenizer and hold 2,048 tokens unless told otherwise."""
    model = {"architecture": "x", "tokenizer_digest": TOKENIZER, "context": 2048, "vocab": 64}
    return {"id": id, "kind": kind, "bytes": 1, **(model if kind == "model" else {"rows": 10}), **facts}


CATALOGUE = [
    catalogue_entry("letters", "prompts"),
    catalogue_entry("actors/small", task="causal_lm"),
    catalogue_entry("rewards/small", task="sequence_classification"),
]


class World:
    """One team (ada owns, ben is a member, vic looks), a stranger in another, and whatever joins."""

    def __init__(self, clock: Any) -> None:
        from oppo_platform.accounts.models import Membership, Team, User
        from oppo_platform.cluster.services import create_join_token
        from oppo_platform.projects.models import Project

        self.clock = clock
        self.team = Team.objects.create(name="Letters", created_at=clock.now())
        self.other_team = Team.objects.create(name="Others", created_at=clock.now())
        people = {"ada": "owner", "ben": "member", "max": "maintainer", "vic": "viewer", "eve": "owner"}
        self.people = {name: User.objects.create_user(name, f"{name}@example.org", "long enough 4 tests") for name in people}
        for name, role in people.items():
            team = self.other_team if name == "eve" else self.team
            Membership.objects.create(team=team, user=self.people[name], role=role)
        self.project = Project.objects.create(team=self.team, name="demo", created_at=clock.now())
        self.other_project = Project.objects.create(team=self.other_team, name="demo", created_at=clock.now())
        self.join_token = create_join_token(hours=1000)

    def login(self, name: str, **options: Any) -> Client:
        """A browser in which this person is logged in."""
        client = Client(**options)
        client.force_login(self.people[name], backend="allauth.account.auth_backends.AuthenticationBackend")
        return client

    def worker(self, name: str = "node1", devices: int = 1, kind: str = "cpu", catalogue: Any = None) -> Worker:
        """A node that has joined and reported."""
        worker = Worker(name, self.join_token)
        worker.heartbeat(devices, kind, catalogue=CATALOGUE if catalogue is None else catalogue)
        return worker

    def submit(self, user: str = "ada", priority: int = 50, **changes: Any) -> Any:
        """A queued run."""
        from oppo_contract import load_spec
        from oppo_platform.runs.services import submit_run

        changes["queue"] = {"priority": priority, **changes.get("queue", {})}
        return submit_run(self.people[user], self.project, load_spec(tiny_spec(**changes)))

    def cycle(self) -> Any:
        """One scheduler cycle."""
        from oppo_platform.scheduling.cycle import run_cycle

        return run_cycle()

    def start(self, worker: Worker, **changes: Any) -> tuple[Any, int]:
        """A run that trains on the worker: (run, attempt id)."""
        run = self.submit(**changes)
        self.cycle()
        attempt = run.attempts.get()
        assert worker.claim(attempt.pk).status_code == 200
        assert worker.attempt(attempt.pk, "heartbeat", {"epoch": 1, "running": True}).status_code == 200
        run.refresh_from_db()
        return run, attempt.pk


@pytest.fixture
def clock() -> Iterator[Any]:
    """The platform's time, which stands still until moved."""
    from oppo_platform.clock import ManualClock, use_clock

    manual = ManualClock(START)
    with use_clock(manual):
        yield manual


@pytest.fixture(scope="session")
def quick_flush(django_db_setup: None) -> None:
    """After each test with real commits Django empties every table, and then makes permissions anew that nobody here uses."""
    post_migrate.disconnect(dispatch_uid="django.contrib.auth.management.create_permissions")
    post_migrate.disconnect(create_contenttypes)


@pytest.fixture
def world(quick_flush: None, transactional_db: None, clock: Any, redis_url: str, settings: Any) -> World:
    """The small world, on real PostgreSQL with real commits, and a real broker."""
    settings.REDIS_URL = settings.WORKER_BROKER_URL = redis_url
    cache.clear()
    broker = redis.from_url(redis_url)
    for queue in broker.scan_iter("oppo.node.*"):
        broker.delete(queue)
    return World(clock)


@pytest.fixture
def minute(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The minute in which requests of tokens are counted, however slow the test is: `now` stands still until set."""
    from oppo_platform.api import rate_limit

    watch = SimpleNamespace(now=time.time(), time=lambda: watch.now)
    monkeypatch.setattr(rate_limit, "time", watch)
    monkeypatch.setattr(rate_limit, "ANSWERS_WITHIN_S", 60.0)
    rate_limit._valkey.cache_clear()
    yield watch
    rate_limit._valkey.cache_clear()


@pytest.fixture
def at_once() -> Callable[..., list[Any]]:
    """Run functions at the same time, each in a thread with its own database connection; their results or exceptions."""

    def run(*functions: Callable[[], Any]) -> list[Any]:
        from django.db import connection

        barrier = threading.Barrier(len(functions))
        results: list[Any] = [None] * len(functions)

        def one(index: int, function: Callable[[], Any]) -> None:
            try:
                barrier.wait(timeout=30)
                results[index] = function()
            except Exception as error:  # noqa: BLE001  # the test looks at what came out
                results[index] = error
            finally:
                connection.close()

        threads = [threading.Thread(target=one, args=(i, f)) for i, f in enumerate(functions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        return results

    return run


def step_event(seq: int, step: int, **metrics: float | str) -> dict[str, Any]:
    """An engine's step event: one second, 100 tokens and one device-second a step."""
    times = {"elapsed_s": float(step), "generated_tokens": 100 * step, "device_seconds": float(step)}
    return {"kind": "step", "producer": "engine", "seq": seq, "time": 1000.0 + step, "step": step, "metrics": metrics, **times}


def started_event(seq: int, start_step: int = 0, time: float = 1000.0) -> dict[str, Any]:
    """An engine's first event."""
    lanes = [["cpu:0", "actor"], ["cpu:1", "reward"]]
    told = {"devices": ["cpu:0", "cpu:1"], "lanes": lanes, "start_step": start_step, "total_steps": 100}
    return {"kind": "started", "producer": "engine", "seq": seq, "time": time, **told}


@pytest.fixture
def events() -> Any:
    """Makers of events: `events.step(seq, step, **metrics)` and `events.started(seq)`."""

    class Makers:
        step = staticmethod(step_event)
        started = staticmethod(started_event)

    return Makers


@pytest.fixture
def make_spec() -> Callable[..., dict[str, Any]]:
    """`tiny_spec`, for tests that send one."""
    return tiny_spec


@pytest.fixture
def make_entry() -> Callable[..., dict[str, Any]]:
    """`catalogue_entry`, for tests that report one."""
    return catalogue_entry


@pytest.fixture
def base_catalogue() -> list[dict[str, Any]]:
    """What workers offer unless told otherwise."""
    return list(CATALOGUE)


@pytest.fixture
def scene(world: World, events: Any, settings: Any, tmp_path: Any) -> dict[str, Any]:
    """Something of everything, by names that stand in the matrix's paths (`matrix.scene`)."""
    from tests.web.matrix.scene import set_the_scene

    settings.OPPO_ARTIFACT_ROOT = tmp_path.as_uri()
    return set_the_scene(world, events)


@pytest.fixture
def pair(world: World, settings: Any) -> Any:
    """A run that is allocated on two nodes."""
    from tests.web.runs.two_node_run import Pair

    settings.OPPO_ARTIFACTS_SHARED = True
    settings.OPPO_RENDEZVOUS_S = 20
    settings.OPPO_LEASE_S = 40
    settings.OPPO_NODE_FRESH_S = 1000
    settings.OPPO_DOWNTIME_S = 1000
    return Pair(world)


@pytest.fixture
def backups(world: Any, tmp_path: Any, settings: Any) -> Any:
    """Backups of this database, put back into another one of the same server; checkpoints lie below the test's folder."""
    from tests.web.backup.backups import Backups

    settings.OPPO_ARTIFACT_ROOT = (tmp_path / "artifacts").as_uri()
    (tmp_path / "artifacts").mkdir()
    made = Backups(tmp_path)
    yield made
    made.clear()


@pytest.fixture
def busy(world: Any, backups: Any, events: Any) -> Any:
    """(world, worker, a run that trains, its attempt): and one that has ended, one that waits, a secret."""
    from oppo_platform.accounts.team_secrets import set_secret
    from tests.web.event_factories import end, tell_everything

    worker = world.worker()
    _, attempt = world.start(worker)
    tell_everything(worker, attempt, events)
    end(worker, attempt)
    run, attempt_id = world.start(worker)
    tell_everything(worker, attempt_id, events)
    world.submit()
    world.cycle()
    set_secret(world.people["ada"], world.team, "HUB_TOKEN", "hf_0123456789")
    return world, worker, run, attempt_id
