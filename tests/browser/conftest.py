"""A whole platform for the browser: ASGI server, scheduler and a worker that tells stories, on a database of its own."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.browser.fleet import Fleet, Supervisor
from tests.browser.story import Story

# Playwright's own event loop runs in this thread, and Django's ORM is used beside it.
os.environ.setdefault("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
WITHIN_MS = 30_000  # a page may take so long for anything, on a machine that has other things to do
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class WebServer:
    """uvicorn with the platform, in a thread; can be stopped and started again on the same port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serve; returns when the first request would be answered."""
        import uvicorn

        config = uvicorn.Config(
            "oppo_platform.asgi:application", host="127.0.0.1", port=self.port, log_level="warning", lifespan="off"
        )
        config.timeout_graceful_shutdown = 1
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, name="uvicorn", daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started, "uvicorn did not start")

    def stop(self) -> None:
        """Stop, open streams included."""
        from django.db import connection

        self.server.should_exit = self.server.force_exit = True
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()
        connection.close_pool()  # as the end of a process does: what its requests held is nobody's any more


def wait_until(condition: Callable[[], Any], otherwise: str | Callable[[], str], within_s: float = 15) -> Any:
    """The condition's first true value; after that many seconds a failure that says `otherwise`."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, otherwise if isinstance(otherwise, str) else otherwise()
        time.sleep(0.03)
    return value


@dataclass
class Platform:
    """What a browser test needs of the server side."""

    web: WebServer
    fleet: Fleet
    user: Any
    password: str
    project: Any
    told: dict[int, tuple[Supervisor, Story]] = field(default_factory=dict)

    def login_path(self) -> str:
        """A one-time link, as a path."""
        from urllib.parse import urlsplit

        from oppo_platform.accounts.services import create_login_link

        return urlsplit(create_login_link(self.user)).path

    def submit(self, name: str, *, overlap: bool = True, steps: int = 60, seed: int = 1) -> int:
        """Queue a run and return its id."""
        from oppo_contract.spec import load_spec
        from oppo_platform.runs.services import submit_run

        self.fleet.beat()  # a node that has been silent for a minute offers nothing
        return int(submit_run(self.user, self.project, load_spec(spec_data(name, overlap=overlap, steps=steps, seed=seed))).pk)

    def start(self, run_id: int) -> tuple[Supervisor, Story]:
        """Schedule, claim and begin: the run is running and its engine has started."""
        from oppo_platform.runs.models import Run
        from oppo_platform.scheduling.cycle import run_cycle

        self.fleet.beat()
        run_cycle()
        supervisor = self.fleet.launch()
        assert supervisor is not None
        assert supervisor.claimed.run_id == run_id
        run = Run.objects.get(pk=run_id)
        story = Story(run.total_steps, overlap=run.preset == "oppo", seed=run.spec["seed"], start=time.time())
        supervisor.tell(story.begin())
        self.told[run_id] = supervisor, story
        return supervisor, story

    def trained(self, name: str, *, overlap: bool = True, steps: int = 60, seed: int = 1) -> int:
        """A run from its submission to its end."""
        run_id = self.submit(name, overlap=overlap, steps=steps, seed=seed)
        supervisor, story = self.start(run_id)
        supervisor.tell(list(story.tell(steps)))
        supervisor.tell(story.end())
        supervisor.end("succeeded", "All steps are done.")
        return run_id

    def release(self) -> None:
        """End whatever still holds the device or waits for it, so that the next test finds it free."""
        from django.db import connections

        from oppo_contract.states import ENDED
        from oppo_platform.runs.lifecycle import cancel_run
        from oppo_platform.runs.models import Run

        for run_id in Run.objects.exclude(state__in=ENDED).order_by("-id").values_list("id", flat=True):
            cancel_run(run_id, "user:test")
        for supervisor, _ in self.told.values():
            if supervisor.order.attempt_id in self.fleet.attempts:
                supervisor.end("cancelled")
        # Playwright runs tests in a context of its own, and Django keeps connections a context.
        connections.close_all()


def spec_data(name: str, *, overlap: bool, steps: int, seed: int = 1) -> dict[str, Any]:
    """A spec that the fleet's catalogue can run."""
    modes = {"intra_step": "per_chunk", "inter_step": "defer"} if overlap else {"intra_step": "off", "inter_step": "off"}
    return {
        "name": name,
        "steps": steps,
        "seed": seed,
        "models": {"actor": {"path": "letters/actor"}, "reward": {"model": {"path": "letters/reward"}}, "critic": "reward"},
        "data": {"prompts": "letters/prompts.jsonl"},
        "rollout": {"max_new_tokens": 512, "max_prompt_tokens": 64},
        "overlap": modes,
        "budget": {"target_reward": 1.0},
    }


@pytest.fixture(scope="package")
def database(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """The test database with real commits, emptied when the browser tests are over."""
    from django.core.management import call_command
    from django.db import connection
    from django.test.utils import setup_databases, teardown_databases

    with django_db_blocker.unblock():
        # pytest-django makes the database only when some test carries its mark, whose rollbacks a server would not see.
        alone = not str(connection.settings_dict["NAME"]).startswith("test_")
        made = setup_databases(verbosity=0, interactive=False, aliases={"default"}) if alone else None
        yield
        if made is not None:
            teardown_databases(made, verbosity=0)
        else:
            call_command("flush", verbosity=0, interactive=False)


@pytest.fixture(scope="package")
def connected(database: None) -> Iterator[None]:
    """Ends every connection to the database that was made meanwhile, whichever thread or context made it.

    Django keeps connections a context, and both the server's threads and Playwright's greenlets have contexts of their
    own; one that is left open keeps the test database from being dropped.
    """
    from django.db import connections
    from django.db.backends.signals import connection_created

    made: weakref.WeakSet[Any] = weakref.WeakSet()

    def remember(connection: Any, **_: Any) -> None:
        made.add(connection)

    connection_created.connect(remember)
    yield
    connection_created.disconnect(remember)
    connections.close_all()  # this context's own, which Django would go on using
    for held in made:
        held.inc_thread_sharing()  # its own thread is gone or idle
        held.close()
    wait_until(lambda: not others_connected(), lambda: f"still connected to the test database: {others_connected()}")


def others_connected() -> list[tuple[Any, ...]]:
    """What the sessions of others on the test database did last."""
    from django.db import connection, connections

    connection.close_pool()
    try:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT application_name, state, query FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return list(cursor.fetchall())
    finally:
        connections.close_all()


@pytest.fixture(scope="package")
def platform(connected: None, redis_url: str) -> Iterator[Platform]:
    """A running platform with a user, a project, and a node that offers models."""
    from django.conf import settings

    from oppo_platform.accounts.models import Membership
    from oppo_platform.cluster.services import create_join_token
    from oppo_platform.pages import views
    from oppo_platform.projects.services import ensure_first_user
    from oppo_platform.runs.selectors import MOST_RUNS_A_PAGE

    settings.REDIS_URL, before = redis_url, settings.REDIS_URL
    views.RUNS_A_PAGE, runs_a_page = MOST_RUNS_A_PAGE, views.RUNS_A_PAGE  # all that the tests of a process submit
    web = WebServer()
    web.start()
    first = ensure_first_user("mira", "mira@example.org")
    fleet = Fleet(web.url, create_join_token())
    fleet.beat()
    project = Membership.objects.get(user=first.user).team.projects.get()
    yield Platform(web, fleet, first.user, first.password or "", project)
    web.stop()
    settings.REDIS_URL, views.RUNS_A_PAGE = before, runs_a_page


@pytest.fixture(scope="package")
def two_runs(platform: Platform) -> tuple[int, int]:
    """The same work twice: sequential, then OPPO."""
    return platform.trained("letters sequential", overlap=False), platform.trained("letters oppo")


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    """A headless browser: $OPPO_CHROMIUM, one on the PATH, or Playwright's own."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WITHIN_MS)
    given = os.environ.get("OPPO_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


# What ends beyond the window, each with its right edge.
TOO_WIDE = """() => [...document.querySelectorAll("body *")]
  .map((at) => [at, Math.round(at.getBoundingClientRect().right)])
  .filter(([, right]) => right > document.documentElement.clientWidth)
  .map(([at, right]) => `${at.tagName.toLowerCase()}#${at.id}.${at.getAttribute("class")} ${right}`).slice(0, 12)"""


class Visitor:
    """A logged-in page that remembers every complaint of the browser's console."""

    def __init__(self, chromium: Any, base_url: str, **context: Any) -> None:
        self.complaints: list[str] = []
        self.expected: tuple[str, ...] = ()
        self.base_url = base_url
        self.context = chromium.new_context(base_url=base_url, **{"viewport": {"width": 1440, "height": 900}, **context})
        self.context.set_default_timeout(WITHIN_MS)
        self.page = self.context.new_page()
        self.page.on(
            "console", lambda m: self.complaints.append(f"{m.text} ({m.location})") if m.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def fits(self) -> None:
        """Wait until the page is not wider than its window: what was drawn for another width is drawn anew."""
        from playwright.sync_api import TimeoutError

        try:
            self.page.wait_for_function("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        except TimeoutError as late:
            raise AssertionError(f"{self.page.url} is wider than its window: {self.page.evaluate(TOO_WIDE)}") from late

    def expects(self, *words: str) -> None:
        """Complaints with one of these words are part of the test, whenever the browser comes to tell them."""
        self.expected += words

    def unexpected(self) -> list[str]:
        """The complaints that nobody expects."""
        return [complaint for complaint in self.complaints if not any(word in complaint for word in self.expected)]


@pytest.fixture
def visit(platform: Platform, chromium: Any) -> Iterator[Callable[..., Visitor]]:
    """Opens logged-in visitors; at the end none of them may have seen an error."""
    opened: list[Visitor] = []

    def open_one(*, logged_in: bool = True, **context: Any) -> Visitor:
        visitor = Visitor(chromium, platform.web.url, **context)
        platform.fleet.beat()
        if logged_in:
            visitor.page.goto(platform.login_path())
        opened.append(visitor)
        return visitor

    yield open_one
    complaints = [complaint for visitor in opened for complaint in visitor.unexpected()]
    for visitor in opened:
        visitor.context.close()
    platform.release()
    assert complaints == []


class Held:
    """Requests of a page that wait for the test."""

    def __init__(self, page: Any, wanted: Any) -> None:
        self.page, self.is_open = page, False
        self.routes: list[Any] = []
        self.waiting: list[Any] = []
        page.route(wanted, lambda route: self._take(route))

    def _take(self, route: Any) -> None:
        self.routes.append(route)
        if self.is_open:
            route.continue_()
        else:
            self.waiting.append(route)

    def come(self, count: int = 1) -> None:
        """Wait until so many were sent."""
        wait_until(lambda: self.page.wait_for_timeout(20) or len(self.routes) >= count, f"{count} requests do not come", 30)

    def answer(self, number: int, reply: Any = None) -> None:
        """Let one be answered, now or with what the server said before, and wait until the page has handled it."""
        route = self.routes[number]
        self.waiting.remove(route)
        with self.page.expect_event("requestfinished", lambda request: request == route.request):
            if reply is None:
                route.continue_()
            else:
                route.fulfill(response=reply)
        self.page.evaluate("() => new Promise((done) => setTimeout(() => requestAnimationFrame(done)))")

    def open(self) -> None:
        """Let all of them through, and those to come."""
        self.is_open = True
        while self.waiting:
            self.waiting.pop().continue_()


@pytest.fixture
def hold(visit: Callable[..., Visitor]) -> Iterator[Callable[[Any, Any], Held]]:
    """Holds requests of a page; at the end all of them are released."""
    held: list[Held] = []

    def one(page: Any, wanted: Any) -> Held:
        held.append(Held(page, wanted))
        return held[-1]

    yield one
    for each in held:
        each.page.unroute_all(behavior="ignoreErrors")
