"""Charts of the run page without a mouse: found, pinned, edited, drawn large, folded, and put back."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from oppo_platform.projects.services import create_project
from tests.browser.conftest import wait_until
from tests.browser.test_keyboard import FOCUSED, focus_is_kept, press, tab_to

pytestmark = pytest.mark.browser


@pytest.fixture
def charts(visit, platform, monkeypatch, request):
    """The page of a run whose metrics are drawn, without pinned charts.

    Its project is its own: the server may still save what the page of the test before sent last.
    """
    monkeypatch.setattr(platform, "project", create_project(platform.user, platform.project.team, request.node.name[:60]))
    page = visit().page
    page.goto(f"/runs/{platform.trained('charts by keyboard', steps=4)}")
    page.wait_for_selector("#metric-groups .metric >> nth=3", state="attached")
    return page


def pin_from_search(page, key):
    tab_to(page, "#metric-search")
    page.keyboard.press("Control+a")
    page.keyboard.type(f"^{key}$")
    expect(page.locator("#metric-count")).to_have_text(re.compile("^1 of"))
    expect(page.locator("#metric-groups .metric:not([hidden]) h3")).to_have_text(key)
    press(page, "summary", f"Actions for {key}")
    press(page, ".menu-body button", "Pin")
    expect(page.locator("#pinned-charts h3").last).to_have_text(key)
    focus_is_kept(page)


def test_a_metric_is_found_and_pinned_and_a_chart_of_several_made(charts):
    page = charts
    pin_from_search(page, "actor/entropy")
    press(page, "#pinned-new", key="Shift+Tab")
    expect(page.locator("#chart-key")).to_be_focused()
    for typed in ("vf_lo", "objective/kl"):
        page.keyboard.type(typed)
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
    press(page, "#chart-keys button", "Move up: objective/kl")
    expect(page.locator("#chart-keys span")).to_have_text(["objective/kl", "critic/vf_loss"])
    tab_to(page, "#chart-log")
    page.keyboard.press("Space")
    press(page, "#chart-save")
    expect(page.locator("#pinned-charts h3").last).to_have_text("objective/kl, critic/vf_loss")
    focus_is_kept(page)


def test_pinned_charts_are_moved_drawn_large_and_unpinned(charts):
    page, names = charts, charts.locator("#pinned-charts h3")
    for key in ("actor/pg_clipfrac", "timing_s/step"):
        pin_from_search(page, key)
    tab_to(page, "#pinned-new", key="Shift+Tab")
    press(page, "#pinned-charts summary", "Actions for timing_s/step")
    press(page, ".menu-body button", "Move left")
    expect(names.last).to_have_text("actor/pg_clipfrac")
    page.keyboard.press("Enter")  # the moved chart's menu has the focus
    press(page, ".menu-body button", "Full screen")
    expect(page.locator("dialog.full h3")).to_have_text("timing_s/step")
    page.keyboard.press("ArrowRight")
    expect(page.locator("dialog.full h3")).to_have_text("actor/pg_clipfrac")
    page.keyboard.press("Escape")
    expect(page.locator("dialog.full")).to_have_count(0)
    expect(page.locator("#pinned-charts summary[aria-label='Actions for timing_s/step']")).to_be_focused()
    page.keyboard.press("Enter")
    press(page, ".menu-body button", "Unpin")
    expect(page.locator("#pinned-new")).to_be_focused()
    press(page, ".toast button", "Undo", key="Shift+Tab")
    expect(names.last).to_have_text("actor/pg_clipfrac")
    expect(names.nth(-2)).to_have_text("timing_s/step")
    assert page.evaluate(FOCUSED, ["#pinned-charts summary", "Actions for timing_s/step"])


def test_pinned_charts_are_edited_shared_and_dropped(charts):
    page, names = charts, charts.locator("#pinned-charts h3")
    pin_from_search(page, "actor/entropy")
    press(page, "#pinned-share", key="Shift+Tab")
    expect(page.locator("#pinned-whose")).to_have_text("for everyone in the project")
    focus_is_kept(page)
    pin_from_search(page, "actor/pg_clipfrac")
    tab_to(page, "#pinned-new", key="Shift+Tab")
    press(page, "#pinned-charts summary", "Actions for actor/pg_clipfrac")
    press(page, ".menu-body button", "Edit")
    expect(page.locator("#chart-key")).to_be_focused()
    tab_to(page, "#chart-title", key="Shift+Tab")
    page.keyboard.type("clipped")
    press(page, "#chart-save")
    expect(names).to_have_text(["actor/entropy", "clipped"])
    focus_is_kept(page)
    press(page, "#pinned-reset", key="Shift+Tab")
    expect(names).to_have_text(["actor/entropy"])
    focus_is_kept(page)


def test_a_pinned_charts_menu_stays_open_while_a_late_save_is_answered(charts):
    """The answer holds what the page already shows, so nothing is drawn anew under the user's hands."""
    page, held = charts, []
    pin_from_search(page, "actor/entropy")
    expect(page.locator(".toast")).to_contain_text("pinned")
    page.route(re.compile(r"/projects/\d+/charts$"), lambda route: held.append(route))
    pin_from_search(page, "actor/pg_clipfrac")
    tab_to(page, "#pinned-new", key="Shift+Tab")
    press(page, "#pinned-charts summary", "Actions for actor/pg_clipfrac")
    tab_to(page, ".menu-body button", "Move left")
    wait_until(lambda: page.wait_for_timeout(20) or held, "the chart is not saved")
    with page.expect_response(re.compile(r"/projects/\d+/charts$")):
        held[0].continue_()
    expect(page.locator(".toast", has_text="actor/pg_clipfrac pinned")).to_be_visible()
    assert page.evaluate(FOCUSED, [".menu-body button", "Move left"])


def test_a_late_saves_message_does_not_replace_undo(charts):
    page, held = charts, []
    page.route(re.compile(r"/projects/\d+/charts$"), lambda route: held.append(route))
    pin_from_search(page, "actor/entropy")
    tab_to(page, "#pinned-new", key="Shift+Tab")
    press_in_menu(page, "#pinned-charts", "actor/entropy", "Unpin")
    expect(page.locator(".toast")).to_contain_text("actor/entropy unpinned")
    with page.expect_request(lambda request: held and request.url == held[0].request.url):  # the next save, after the answer
        held[0].continue_()
    press(page, ".toast button", "Undo", key="Shift+Tab")
    expect(page.locator("#pinned-charts h3")).to_have_text("actor/entropy")


def test_a_charts_menu_is_filled_before_the_next_key(charts):
    """Read in the same task as the click: the browser fires `toggle` only in a later one, which a fast Tab comes before."""
    entries = "(summary) => { summary.click(); return [...summary.nextSibling.children].map((node) => node.textContent); }"
    first = charts.locator("#metric-groups summary[aria-label]").first
    assert first.evaluate(entries) == ["Pin", "Full screen", "Logarithmic axis"]


def press_in_menu(page, place, title, entry):
    """Choose an entry of a chart's menu."""
    press(page, f"{place} summary", f"Actions for {title}")
    press(page, ".menu-body button", entry)


def test_a_metrics_chart_has_a_logarithmic_axis_and_is_drawn_large_and_its_group_folded(charts):
    page, key = charts, "actor/entropy"
    menu = page.locator(f"#metric-groups summary[aria-label='Actions for {key}']")
    tab_to(page, "#metric-search")
    press_in_menu(page, "#metric-groups", key, "Logarithmic axis")
    expect(menu).to_be_focused()
    page.wait_for_function("(key) => document.querySelector(`[data-key='${key}']`)._fullLayout?.yaxis.type === 'log'", arg=key)
    page.keyboard.press("Enter")
    press(page, ".menu-body button", "Full screen")
    expect(page.locator("dialog.full h3")).to_have_text(key)
    press(page, "dialog.full button", "Next chart", key="Shift+Tab")
    expect(page.locator("dialog.full h3")).not_to_have_text(key)
    press(page, "dialog.full button", "Close")
    expect(menu).to_be_focused()
    tab_to(page, "#metric-group-actor > summary", key="Shift+Tab")
    for is_open in (False, True):
        page.keyboard.press("Enter")
        expect(menu).to_be_visible(visible=is_open)
        expect(page.locator("#metric-group-actor > summary")).to_be_focused()


def test_a_chart_of_several_is_edited_and_cancelled_and_pinned_charts_moved_right(charts):
    page, names = charts, charts.locator("#pinned-charts h3")
    chosen = page.locator("#chart-keys span")
    for key in ("actor/entropy", "timing_s/step"):
        pin_from_search(page, key)
    tab_to(page, "#pinned-new", key="Shift+Tab")
    press_in_menu(page, "#pinned-charts", "actor/entropy", "Move right")
    expect(names).to_have_text(["timing_s/step", "actor/entropy"])
    assert page.evaluate(FOCUSED, ["#pinned-charts summary", "Actions for actor/entropy"])
    page.keyboard.press("Enter")
    press(page, ".menu-body button", "Edit")
    page.keyboard.type("objective/kl")
    page.keyboard.press("Enter")
    press(page, "#chart-keys button", "Move down: actor/entropy")
    expect(chosen).to_have_text(["objective/kl", "actor/entropy"])
    assert page.evaluate(FOCUSED, ["#chart-keys button", "Move down: actor/entropy"])
    press(page, "#chart-keys button", "Remove actor/entropy")
    expect(chosen).to_have_text(["objective/kl"])
    assert page.evaluate(FOCUSED, ["#chart-keys button", "Remove objective/kl"])
    page.keyboard.press("Enter")
    expect(page.locator("#chart-key")).to_be_focused()
    press(page, "#chart-editor button", "Cancel")
    expect(names).to_have_text(["timing_s/step", "actor/entropy"])
    assert page.evaluate(FOCUSED, ["#pinned-charts summary", "Actions for actor/entropy"])


def test_own_pinned_charts_come_back_after_those_of_the_project_were_chosen(charts):
    page, names = charts, charts.locator("#pinned-charts h3")
    pin_from_search(page, "actor/entropy")
    press(page, "#pinned-share", key="Shift+Tab")
    expect(page.locator("#pinned-whose")).to_have_text("for everyone in the project")
    pin_from_search(page, "timing_s/step")
    press(page, "#pinned-reset", key="Shift+Tab")
    expect(names).to_have_text(["actor/entropy"])
    press(page, ".toast button", "Undo", key="Shift+Tab")
    expect(names).to_have_text(["actor/entropy", "timing_s/step"])
    expect(page.locator("#pinned-new")).to_be_focused()


def test_the_cursor_of_all_charts_moves_by_keys(charts):
    page, line = charts, charts.locator("#plot-kl line.linked-cursor")
    newest = page.locator("#by-reward").inner_text()
    expect(line).to_have_attribute("visibility", "hidden")
    page.keyboard.press("ArrowLeft")
    expect(line).to_have_attribute("visibility", "visible")
    expect(page.locator("#by-reward")).to_contain_text("step 4")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#by-reward")).to_contain_text("step 3")
    for key in ["ArrowLeft"] * 3:
        page.keyboard.press(key)
    expect(page.locator("#by-reward")).to_contain_text("step 1")
    for key in ["ArrowRight"] * 4:
        page.keyboard.press(key)
    expect(line).to_have_attribute("visibility", "hidden")
    expect(page.locator("#by-reward")).to_have_text(newest)
