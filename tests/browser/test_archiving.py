"""A run that has ended is archived on its page, which takes it from the list, and shown there again."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_a_run_is_archived_on_its_page_and_brought_back(visit, platform):
    from oppo_platform.runs.lifecycle import cancel_run

    page = visit().page
    run_id = platform.submit("letters shelved", steps=5)
    page.goto(f"/runs/{run_id}")
    archived = page.locator("[data-part=archived]")
    expect(page.locator(".pill[data-state=queued]").first).to_be_visible()
    expect(archived).to_have_text("")
    cancel_run(run_id, "user:mira")
    archived.get_by_role("button", name="archive", exact=True).click()
    expect(archived).to_contain_text("archived")
    page.goto("/runs")
    expect(page.locator(f"a[href='/runs/{run_id}']")).to_have_count(0)
    page.goto("/runs?q=archived:yes")
    page.locator(f"a[href='/runs/{run_id}']").first.click()
    page.get_by_role("button", name="unarchive").click()
    expect(archived.get_by_role("button", name="archive", exact=True)).to_be_visible()
    page.goto("/runs")
    expect(page.locator(f"a[href='/runs/{run_id}']").first).to_be_visible()
