"""Deleting runs in the browser: from the list with undo, from the run's page, and back out of the trash."""

from __future__ import annotations

import pytest

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
