"""The Events tab: one list of everything that befell the run, filtered and searched, that grows while one looks."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_events_are_filtered_searched_and_grow(visit, platform, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/events")
    page.wait_for_selector("#events tr[data-kind=decision]")
    expect(page.locator("#events tr").first.locator("td").first.locator("time")).to_be_visible()
    page.click("[data-kinds='state,change']")
    page.wait_for_function("() => !document.querySelector('#events tr[data-kind=decision]')")
    expect(page.locator("#events .pill").nth(0)).to_have_attribute("data-state", "succeeded")
    expect(page.locator("#events .pill").nth(1)).to_have_attribute("data-state", "running")
    page.wait_for_url("**/events?kinds=state,change")
    page.keyboard.press("/")
    page.keyboard.type("all steps")
    page.wait_for_function("() => document.querySelectorAll('#events tr').length === 1")
    page.wait_for_selector("#events mark >> text=All")
    page.go_back()
    page.wait_for_selector("#events tr[data-kind=decision]")
    run_id = platform.submit("letters events", steps=30)
    page.goto(f"/runs/{run_id}/events")
    page.wait_for_selector("#events .pill[data-state=queued]")
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(16)))
    page.wait_for_selector("#events .pill[data-state=running]")
    page.wait_for_selector("#events tr[data-kind=decision] >> text=the reward rises")


def test_the_config_is_downloaded_and_forked(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/config")
    with page.expect_download() as started:
        page.click("text=Download")
    assert started.value.suggested_filename == f"run-{two_runs[1]}.yaml"
    assert started.value.path().read_text() == page.inner_text("#spec-text")  # drawn by the server
    page.click("text=Fork with changes")
    page.wait_for_url(f"**/runs/new?from={two_runs[1]}")
