"""The queue: arrows change the priority of one's own runs, by mouse and by keyboard, and a lost platform is told."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import spec_data
from tests.browser.fleet import CATALOGUE, Fleet

pytestmark = pytest.mark.browser


def test_arrows_change_the_priority_and_keep_the_focus(visit, platform):
    from oppo_platform.runs.models import Run

    run_id = platform.submit("letters raised")
    page = visit().page
    page.goto("/queue")
    page.click(f"#raise-{run_id}")
    page.wait_for_selector(f"#said >> text=letters raised #{run_id} has priority 60 now.")
    page.wait_for_selector(f"#raise-{run_id}[data-to='70']")
    page.focus(f"#lower-{run_id}")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#said >> text=letters raised #{run_id} has priority 50 now.")
    page.wait_for_function("name => document.activeElement.id === name", arg=f"lower-{run_id}")
    assert Run.objects.get(pk=run_id).priority == 50


def test_a_platform_that_is_away_is_told_and_nothing_changes(visit, platform):
    from oppo_platform.runs.models import Run

    run_id = platform.submit("letters kept")
    visitor = visit()
    visitor.expects("net::ERR")  # of the request that is cut off on purpose
    page = visitor.page
    page.goto("/queue")
    page.route("**/priority", lambda route: route.abort())
    page.click(f"#raise-{run_id}")
    page.wait_for_function("() => document.getElementById('said').textContent.trim() !== ''")
    assert Run.objects.get(pk=run_id).priority == 50
    page.unroute("**/priority")
    page.click(f"#raise-{run_id}")  # the arrow can be used again
    page.wait_for_selector(f"#said >> text=letters kept #{run_id} has priority 60 now.")


def test_a_run_whose_node_is_silent_has_lost_contact_on_every_page(visit, platform):
    from datetime import timedelta

    from oppo_platform import clock
    from oppo_platform.runs.models import Attempt

    run_id = platform.submit("letters silent node", steps=20)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(3)))
    page = visit().page
    page.goto(f"/runs/{run_id}")
    page.wait_for_selector("#run [data-part=state] .pill[data-state=running]")
    Attempt.objects.filter(run=run_id).update(seen_at=clock.now() - timedelta(minutes=3))
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # otherwise it polls after 20 s without an event
    page.wait_for_selector("#run .pill[data-state=lost]")
    expect(page.locator("#run [data-part=reason]")).to_contain_text("No heartbeat from node-1 since")
    expect(page.locator("#run [data-part=time-label]")).to_have_text("Last contact")
    page.goto("/runs")
    row = page.locator(f"#run-{run_id}")
    expect(row.locator(".pill")).to_have_text("Lost contact")
    expect(row.locator("[data-col=time]")).to_contain_text("since")
    page.goto("/queue")
    expect(page.locator(f"#active-{run_id} .pill")).to_have_text("Lost contact")
    supervisor.beat()
    page.wait_for_selector(f"#active-{run_id} .pill[data-state=running]")


@pytest.fixture
def second_node(platform):
    """Makes another node, which is removed after the test."""
    from oppo_platform.cluster.models import Node, Pool
    from oppo_platform.cluster.services import create_join_token

    def join(**given):
        Fleet(platform.web.url, create_join_token(), "node-2", **given).beat()
        return Node.objects.get(name="node-2")

    yield join
    Node.objects.filter(name="node-2").delete()
    Pool.objects.filter(nodes=None).delete()


def test_runs_that_only_a_silent_node_can_take_come_last(visit, platform, second_node):
    from datetime import timedelta

    from oppo_contract.spec import load_spec
    from oppo_platform import clock
    from oppo_platform.cluster.models import Node
    from oppo_platform.runs.services import submit_run
    from oppo_platform.scheduling.cycle import run_cycle

    platform.start(platform.submit("letters holder"))
    actor = next(entry for entry in CATALOGUE if entry.id == "letters/actor")
    node = second_node(more=[actor.model_copy(update={"id": "letters/spare"})])
    data = spec_data("letters elsewhere", overlap=True, steps=20)
    data |= {"queue": {"priority": 90}, "models": data["models"] | {"actor": {"path": "letters/spare"}}}
    elsewhere = submit_run(platform.user, platform.project, load_spec(data)).pk
    here = platform.submit("letters here")
    Node.objects.filter(pk=node.pk).update(last_seen_at=clock.now() - timedelta(minutes=3))
    run_cycle()
    page = visit().page
    page.goto("/queue")
    rows = page.locator("tr[id^=waiting-]")
    assert rows.evaluate_all("rows => rows.map((row) => row.id)") == [f"waiting-{here}", f"waiting-{elsewhere}"]
    expect(rows.locator("td:first-child")).to_have_text(["1", "2"])
    expect(page.locator("#waiting")).to_contain_text("runs that no connected node can take come last")


def test_the_words_below_the_map_are_there_once_and_say_how_a_worker_joins(visit, platform, second_node):
    from oppo_platform.cluster.pools import move_node

    move_node(second_node().pk, "spare")
    page = visit().page
    page.goto("/queue#join")
    expect(page.locator("#pool-2 .node")).to_have_count(1)
    expect(page.locator("text=A block is one run")).to_have_count(1)
    expect(page.locator("#join ol")).to_be_visible()
    with page.expect_response("**/queue?part=1**"):
        pass
    expect(page.locator("#join ol"), "it stays open when the page is refreshed").to_be_visible()
