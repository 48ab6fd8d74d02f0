"""Charts that a user pins above all metrics, for oneself and for the project."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def opened(page, name):
    """Open the menu of a metric's card."""
    card = page.locator(f".metric[data-name='{name}']").last
    card.locator("summary").click()  # looks again if the card leaves the page meanwhile
    return card.locator(".menu-body")


def test_charts_are_pinned_combined_and_moved(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#metric-groups .metric >> nth=3", state="attached")
    expect(page.locator("#pinned-none")).to_be_visible()
    opened(page, "actor/entropy").get_by_text("Pin", exact=True).click()
    expect(page.locator("#pinned-whose")).to_have_text("only for you")
    page.wait_for_selector("#pinned-charts [data-key='actor/entropy'] .main-svg >> nth=0")
    page.click("#pinned-new")
    page.fill("#chart-title", "losses")
    page.fill("#chart-key", "vf_lo")
    page.keyboard.press("Enter")
    page.fill("#chart-key", "objective/kl")
    page.keyboard.press("Enter")
    page.fill("#chart-key", "no such")
    page.keyboard.press("Enter")
    expect(page.locator("#chart-status")).to_contain_text("no metric “no such”")
    page.click("#chart-save")
    names = page.locator("#pinned-charts h3")
    expect(names).to_have_text(["actor/entropy", "losses"])
    expect(page.locator("#pinned-charts .legend li")).to_have_count(2)
    page.locator("#pinned-charts summary").nth(1).focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Move left").click()
    expect(names).to_have_text(["losses", "actor/entropy"])
    expect(page.locator("#pinned-charts summary").first).to_be_focused()
    # Saves follow each other: the one of the move may be answered first.
    with page.expect_response(lambda response: '"log":true' in (response.request.post_data or "")):
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Logarithmic axis").click()
    page.reload()
    expect(names).to_have_text(["losses", "actor/entropy"])
    page.wait_for_function("() => document.querySelector('#pinned-charts .plot')._fullLayout?.yaxis.type === 'log'")


PINNED = """async () => {
  const { post } = await import("/static/js/core/api.js");
  const { project } = JSON.parse(document.getElementById("chart-layout").textContent);
  const losses = { title: "losses", keys: ["critic/vf_loss", "objective/kl"], log: true };
  await post(`projects/${project}/charts`, { charts: [losses, { keys: ["actor/entropy"] }] });
}"""


def test_pinned_charts_are_shared_with_the_project_drawn_large_and_unpinned(visit, two_runs):
    page = visit().page
    names = page.locator("#pinned-charts h3")
    page.goto(f"/runs/{two_runs[0]}")
    page.evaluate(PINNED)
    page.reload()
    page.click("#pinned-share")
    expect(page.locator("#pinned-whose")).to_have_text("for everyone in the project")
    page.goto(f"/runs/{two_runs[1]}")
    expect(names).to_have_text(["losses", "actor/entropy"])
    page.locator("#pinned-charts summary").first.click()
    page.get_by_role("button", name="Full screen").click()
    page.wait_for_selector("dialog.full .main-svg >> nth=0")
    page.keyboard.press("ArrowRight")
    expect(page.locator("dialog.full h3")).to_have_text("actor/entropy")
    page.keyboard.press("Escape")
    expect(page.locator("dialog.full")).to_have_count(0)
    page.locator("#pinned-charts summary").first.click()
    page.get_by_role("button", name="Unpin").click()
    expect(names).to_have_text(["actor/entropy"])
    page.get_by_role("button", name="Undo").click()
    expect(names).to_have_text(["losses", "actor/entropy"])
    page.click("#pinned-reset")
    expect(page.locator("#pinned-reset")).to_be_hidden()


def test_a_chart_that_cannot_be_saved_is_not_shown_as_pinned(visit, two_runs):
    visitor = visit()
    visitor.expects("ERR_FAILED")
    page = visitor.page
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#metric-groups .metric >> nth=3", state="attached")
    before = page.locator("#pinned-charts h3").all_inner_texts()
    page.route("**/api/v1/projects/*/charts", lambda route: route.abort())
    opened(page, "timing_s/step").get_by_text("Pin", exact=True).click()
    expect(page.locator(".toast")).to_contain_text("Not saved")
    expect(page.locator("#pinned-charts h3")).to_have_text(before)
