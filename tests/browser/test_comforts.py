"""The command palette, the account menu, names, tags and notes, and selecting many runs."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_the_palette_opens_pages_runs_and_actions(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#plot-reward .main-svg >> nth=0")
    palette = page.locator("dialog.palette")
    page.keyboard.press("Control+k")
    expect(palette.get_by_role("option").filter(has_text="Alerts")).to_have_text(re.compile(r"^Alerts\s*page$"))
    page.keyboard.type("queue")
    page.keyboard.press("Enter")
    page.wait_for_url("**/queue")
    page.keyboard.press("Control+k")
    page.keyboard.type(f"#{two_runs[1]}")
    palette.get_by_role("option", name=f"letters oppo #{two_runs[1]}").click()
    page.wait_for_url(f"**/runs/{two_runs[1]}")
    page.keyboard.press("Control+k")
    page.keyboard.type("name, tags")
    page.keyboard.press("Enter")
    expect(page.locator("#labels-dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    expect(palette).to_be_visible()
    page.keyboard.press("Escape")
    expect(palette).to_have_count(0)


def test_name_tags_and_notes_of_a_run(visit, platform):
    run_id = platform.submit("to be renamed", steps=3)
    page = visit().page
    page.goto(f"/runs/{run_id}")
    page.click("[data-dialog=labels-dialog]")
    page.fill("#label-name", "llama3/8b lr=1e-5 β")
    page.fill("#label-tags", "baseline two words")
    page.fill("#label-notes", "**diverged**\n\n- twice\n\n<b>text</b>")
    page.click("#labels-save")
    expect(page.locator("h1")).to_have_text(f"llama3/8b lr=1e-5 β #{run_id}")
    expect(page.locator("[data-part=tags] .tag")).to_have_text(["baseline", "two", "words"])
    expect(page.locator(".notes strong")).to_have_text("diverged")
    expect(page.locator(".notes")).to_contain_text("<b>text</b>")
    page.click("[data-dialog=labels-dialog]")
    page.fill("#label-tags", "words")
    page.fill("#label-notes", "")
    page.click("#labels-save")
    expect(page.locator("[data-part=tags] .tag")).to_have_text(["words"])
    expect(page.locator(".notes")).to_have_count(0)


@pytest.mark.parametrize("width", [390, 1440])
def test_the_account_menu_signs_out(visit, width):
    visitor = visit(viewport={"width": width, "height": 844})
    page = visitor.page
    page.goto("/queue")
    page.locator(".account summary").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Change password")).to_be_visible()
    visitor.fits()
    page.keyboard.press("Escape")
    expect(page.get_by_role("link", name="Change password")).to_be_hidden()
    page.click(".account summary")
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/accounts/login/**")


def test_shift_click_selects_a_range_and_one_box_selects_all(visit, platform, two_runs):
    for n in range(3):
        platform.submit(f"range {n}", steps=3)
    page = visit().page
    page.goto("/runs?view=all&q=name:range")
    boxes = page.locator("#rows input")
    expect(boxes).to_have_count(3)
    boxes.nth(0).click()
    boxes.nth(2).click(modifiers=["Shift"])
    expect(page.locator("#picked")).to_have_text("3 runs selected.")
    expect(page.locator("#select-all")).to_be_checked()
    boxes.nth(1).click()
    expect(page.locator("#select-all")).not_to_be_checked()
    page.check("#select-all")
    expect(page.locator("#picked")).to_have_text("3 runs selected.")
    page.uncheck("#select-all")
    expect(page.locator("#rows input:checked")).to_have_count(0)
