"""Deleting runs in the browser: from the list with undo, from the run's page, and back out of the trash."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import wait_until

pytestmark = pytest.mark.browser


def cancelled(platform, name):
    """The id of a run that has ended."""
    from oppo_platform.runs.lifecycle import cancel_run

    run_id = platform.submit(name, steps=20)
    cancel_run(run_id, "user:ada")
    return run_id


def test_ticked_runs_are_deleted_and_brought_back(visit, platform):
    ids = [cancelled(platform, f"letters unwanted {n}") for n in (1, 2)]
    page = visit().page
    page.goto("/runs?q=unwanted")
    for run_id in ids:
        page.check(f"#rows input[value='{run_id}']")
    page.click("[data-bulk=delete]")
    page.wait_for_selector("#bulk-words >> text=can be restored")
    page.click("#bulk-confirm")
    page.wait_for_selector("text=2 runs deleted")
    page.wait_for_selector(f"#rows tr[data-key='{ids[0]}']", state="detached")
    page.click(".toast >> text=Undo")
    page.wait_for_selector("text=2 runs restored")
    page.wait_for_selector(f"#rows tr[data-key='{ids[1]}']")
    page.goto(f"/runs/{ids[0]}/config")
    page.click("#delete")
    page.click("#delete-confirm")
    page.wait_for_selector("h2 >> text=In trash")
    page.click("text=Team trash")
    page.locator("tr", has_text="letters unwanted 1").locator("text=Delete permanently").click()
    page.click("text=Keep in trash")
    page.locator("tr", has_text="letters unwanted 1").get_by_role("button", name="Restore").click()
    page.wait_for_selector("text=letters unwanted 1 was restored.")
    page.wait_for_selector("#delete", state="visible")


def test_a_read_under_way_is_aborted_before_the_run_is_deleted_and_sent_anew_if_it_is_not(visit, hold, platform):
    run_id = cancelled(platform, "letters read")
    visitor = visit()
    visitor.expects("503")  # the failure itself
    page = visitor.page
    reads = hold(page, "**/decisions?*")
    page.goto(f"/runs/{run_id}")
    reads.come()
    removal = hold(page, f"**/api/v1/runs/{run_id}")
    page.click("#delete")
    page.click("#delete-confirm")
    removal.come()
    assert_aborted(page, reads.routes[0])
    removal.waiting.pop().fulfill(status=503, json={"title": "Busy"})
    expect(page.locator("#delete-dialog .error")).to_have_text("Busy")
    reads.come(2)
    page.click("#delete-confirm")
    removal.come(2)
    assert_aborted(page, reads.routes[1])
    removal.open()
    page.wait_for_selector("h2 >> text=In trash")


def assert_aborted(page, route):
    """By the page, not by the browser, which aborts what is pending when a page is left."""
    wait_until(lambda: page.wait_for_timeout(20) or route.request.failure, "the request is still pending")
    assert route.request.failure == "net::ERR_ABORTED"


def test_charts_that_load_while_the_run_is_deleted_read_nothing_until_the_page_is_restored(visit, hold, platform):
    run_id = cancelled(platform, "letters late")
    page = visit().page
    plotly = hold(page, "**/vendor/plotly*")
    page.goto(f"/runs/{run_id}", wait_until="commit")  # what is held would delay the page's load event
    plotly.come()
    removal = hold(page, f"**/api/v1/runs/{run_id}")
    reads = hold(page, "**/decisions?*")
    page.click("#delete")
    page.click("#delete-confirm")
    removal.come()
    plotly.open()
    expect(page.locator("#plot-reward .main-svg").first).to_be_attached()
    assert reads.routes == []
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
    reads.come()  # the browser's Back restored the page
    removal.open()
    page.wait_for_selector("h2 >> text=In trash")
