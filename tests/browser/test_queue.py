"""The queue: arrows change the priority of one's own runs, by mouse and by keyboard, and a lost platform is told."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

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


def test_the_words_below_the_map_are_there_once_and_say_how_a_worker_joins(visit, platform):
    page = visit().page
    page.goto("/queue#join")
    expect(page.locator("text=A block is one run")).to_have_count(1)
    expect(page.locator("#join ol")).to_be_visible()
    with page.expect_response("**/queue?part=1**"):
        pass
    expect(page.locator("#join ol"), "it stays open when the page is refreshed").to_be_visible()
