"""Whatever rows of a list arrive late, it shows those of the newest request, and keeps the focus and what was clicked."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import wait_until

pytestmark = pytest.mark.browser


def rows_of(url):
    """Whether it is the list of runs, asked for anew."""
    return "part=rows" in url


def test_rows_of_an_earlier_filter_do_not_replace_those_of_the_newer(visit, hold, two_runs):
    page = visit().page
    page.goto("/runs?q=preset:oppo,sequential")
    sequential, oppo = (page.locator(f"#rows tr[data-key='{run_id}']") for run_id in two_runs)
    expect(sequential).to_have_count(1)
    held = hold(page, rows_of)
    page.fill("#filter", "preset:sequential")
    wait_until(lambda: page.wait_for_timeout(20) or asked_for(held, "sequential"), "the filter is not asked for", 30)
    page.fill("#filter", "preset:oppo")
    wait_until(lambda: page.wait_for_timeout(20) or asked_for(held, "oppo"), "the filter is not asked for", 30)
    held.answer(asked_for(held, "oppo")[-1])
    expect(sequential).to_have_count(0)
    expect(oppo).not_to_have_count(0)
    assert [held.routes[n].request.failure for n in asked_for(held, "sequential")] == ["net::ERR_ABORTED"]
    held.open()


def asked_for(held, preset):
    """The numbers of the requests with this filter alone."""
    return [number for number, route in enumerate(held.routes) if re.search(f"q=preset(:|%3A){preset}(&|$)", route.request.url)]


def test_an_earlier_filter_that_is_no_longer_aborted_does_not_replace_the_newest(visit, hold, two_runs):
    """htmx forgets the pending request when the one before it has ended, so a third does not abort the second."""
    page = visit().page
    page.goto("/runs")
    sequential, oppo = (page.locator(f"#rows tr[data-key='{run_id}']") for run_id in two_runs)
    held = hold(page, rows_of)
    for preset in ("overlap", "sequential", "oppo"):
        page.fill("#filter", f"preset:{preset}")
        wait_until(lambda preset=preset: page.wait_for_timeout(20) or asked_for(held, preset), "the filter is not asked for", 30)
    second, third = asked_for(held, "sequential")[-1], asked_for(held, "oppo")[-1]
    held.answer(third)
    expect(sequential).to_have_count(0)
    expect(oppo).to_have_count(1)
    assert held.routes[second].request.failure is None
    held.answer(second)
    expect(sequential).to_have_count(0)
    expect(oppo).to_have_count(1)
    held.open()


HALF_A_RESPONSE = """() => {
  const real = window.fetch;
  window.fetch = async (url, request) => {
    const response = await real(url, request);
    if (!String(url).includes("part=rows")) return response;
    window.fetch = real;
    window.half = true;
    const body = new ReadableStream({
      start(controller) {
        controller.enqueue(new TextEncoder().encode("<tr id=half>"));
        request.signal.addEventListener("abort", () => controller.error(request.signal.reason));
      },
    });
    return new Response(body, { headers: response.headers });
  };
}"""


def test_a_list_whose_response_is_replaced_half_way_does_not_look_disconnected(visit, hold, two_runs):
    page = visit().page
    page.goto("/runs")
    connection = page.locator("#live").text_content()
    page.evaluate(HALF_A_RESPONSE)
    page.wait_for_function("() => window.half")
    held = hold(page, rows_of)
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
    held.come()
    page.evaluate("() => new Promise((done) => setTimeout(() => requestAnimationFrame(done)))")
    expect(page.locator("#live")).to_have_text(connection)
    held.answer(0)
    expect(page.locator("#half")).to_have_count(0)
    for run_id in two_runs:
        expect(page.locator(f"#rows tr[data-key='{run_id}']")).to_have_count(1)
    held.open()


def test_a_row_drawn_anew_keeps_the_focus_and_one_under_the_pointer_stays_until_it_is_a_click(visit, hold, two_runs):
    page = visit().page
    page.goto("/runs")
    box = page.locator(f"#rows input[value='{two_runs[0]}']")
    box.focus()
    page.evaluate("() => { window.was = document.activeElement; }")
    for _ in range(2):
        with page.expect_response("**/runs?part=rows**"):
            pass
    expect(box).to_be_focused()
    assert page.evaluate("() => window.was.isConnected"), "rows are changed, not replaced"
    page.goto("/teams")  # nothing of the list is on its way any more
    held = hold(page, rows_of)
    page.goto("/runs")
    box.hover()
    page.evaluate("selector => { window.was = document.querySelector(selector); }", f"#rows input[value='{two_runs[0]}']")
    held.come()
    page.mouse.down()
    held.answer(0)
    assert page.evaluate("() => window.was.isConnected")
    page.mouse.up()
    expect(box).to_be_checked()
    held.open()
    with page.expect_response("**/runs?part=rows**"):
        pass
    expect(box).to_be_checked()
