"""The list of runs and the head of a run's page without a mouse: selecting, deleting, restoring, views, notes and tags."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.test_keyboard import FOCUSED, focus_is_kept, press, tab_to
from tests.browser.test_storage import cancelled

pytestmark = pytest.mark.browser


def test_all_runs_of_a_list_are_selected_deleted_and_restored(visit, platform):
    ids = [cancelled(platform, f"letters by keys {n}") for n in (1, 2)]
    page = visit().page
    page.goto('/runs?q="by keys"')
    rows = page.locator("#rows tr")
    expect(rows).to_have_count(2)
    for restored in (True, False):
        tab_to(page, "#select-all")
        page.keyboard.press("Space")
        expect(page.locator("#picked")).to_have_text("2 runs selected.")
        press(page, "[data-bulk=delete]", key="Shift+Tab")
        expect(page.locator("#bulk-confirm")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator(".toast")).to_contain_text("2 runs deleted")
        expect(rows).to_have_count(0)
        expect(page.locator("[data-bulk=delete]")).to_be_hidden()
        focus_is_kept(page)
        if restored:
            press(page, ".toast button", "Undo")
            expect(page.locator(".toast")).to_have_text("2 runs restored")
            expect(rows).to_have_count(2)
            focus_is_kept(page)
    page.goto(f"/teams/{platform.project.team_id}/storage")
    press(page, "button", f"Restore letters by keys 1 #{ids[0]}")
    expect(page.locator(".banner").first).to_contain_text("was restored")
    expect(page.locator("#delete")).to_be_visible()


def test_a_saved_view_is_deleted_and_restored(visit, two_runs):
    page = visit().page
    page.goto("/runs?q=preset:oppo")
    press(page, "#views summary")
    press(page, "#view-save")
    page.keyboard.type("by keys")
    press(page, "#view-sure")
    page.wait_for_url("**&view=*")
    view = page.locator("#views-list li", has_text="by keys")
    press(page, "#views summary")
    for restored in (True, False):
        press(page, "#views-list button", "Delete by keys")
        expect(page.locator(".toast")).to_contain_text("by keys deleted")
        expect(view).to_have_count(0)
        assert page.evaluate(FOCUSED, ["#views-list a", ""])
        if restored:
            press(page, ".toast button", "Undo", key="Shift+Tab")
            expect(view.locator("a")).to_be_focused()


def test_a_run_gets_tags_and_notes_and_is_deleted_on_its_page_and_restored(visit, platform):
    run_id = cancelled(platform, "letters noted")
    page = visit().page
    page.goto(f"/runs/{run_id}")
    press(page, "[data-dialog=labels-dialog]")
    tab_to(page, "#label-tags")
    page.keyboard.type("noted kept")
    tab_to(page, "#label-notes")
    page.keyboard.type("**twice**")
    press(page, "#labels-save")
    expect(page.locator(".notes strong")).to_have_text("twice")
    expect(page.locator("[data-part=tags] .tag")).to_have_text(["noted", "kept"])
    press(page, "#delete")
    press(page, "#delete-dialog button", "Cancel", key="Shift+Tab")
    expect(page.locator("#delete-dialog")).to_be_hidden()
    expect(page.locator("#delete")).to_be_focused()
    page.keyboard.press("Enter")
    press(page, "#delete-confirm")
    page.wait_for_selector("h2 >> text=In trash")
    press(page, "button", "Restore")
    expect(page.locator(".banner").first).to_contain_text("was restored")
    page.wait_for_url(re.compile(rf"/runs/{run_id}$"))
    expect(page.locator("#delete")).to_be_visible()


def test_alerts_are_silenced_and_a_run_archived_by_the_same_button(visit, platform):
    from oppo_platform.runs.lifecycle import cancel_run

    page = visit().page
    run_id = platform.submit("letters quiet", steps=5)
    page.goto(f"/runs/{run_id}")
    expect(page.locator(".pill[data-state=queued]").first).to_be_visible()
    silence, archived = (page.locator(f"[data-part={name}]") for name in ("silence", "archived"))
    press(page, "button", "silence alerts")
    expect(silence).to_have_text(" · alerts silenced unsilence")
    expect(silence.locator("button")).to_be_focused()
    page.keyboard.press("Enter")
    expect(silence).to_have_text(" · silence alerts")
    expect(silence.locator("button")).to_be_focused()
    cancel_run(run_id, "user:mira")
    expect(silence).to_have_text("")
    press(page, "button", "archive")
    expect(archived).to_have_text(" · archived unarchive")
    expect(archived.locator("button")).to_be_focused()


def test_a_range_of_runs_is_selected(visit, platform):
    for n in range(3):
        platform.submit(f"picked {n}", steps=3)
    page = visit().page
    page.goto("/runs?view=all&q=name:picked")
    expect(page.locator("#rows tr")).to_have_count(3)
    tab_to(page, "#rows input")
    page.keyboard.press("Space")
    tab_to(page, "#rows tr:nth-child(3) input")
    page.keyboard.press("Shift+Space")
    expect(page.locator("#picked")).to_have_text("3 runs selected.")
