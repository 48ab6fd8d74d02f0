"""The run page while it loads, its keys, and the charts of all metrics."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_loading_does_not_look_like_empty(visit, two_runs):
    visitor = visit()
    page, held, is_open = visitor.page, [], []

    def hold(route):
        if is_open:
            route.continue_()
        else:
            held.append(route)

    page.route("**/api/v1/runs/*/metrics**", hold)
    page.route("**/api/v1/runs/*/samples**", hold)
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_function("() => document.querySelector('#run [data-part=step]').textContent !== '–'")
    expect(page.locator("#samples-none")).to_be_hidden()
    expect(page.locator("#samples .skeleton").first).to_be_visible()
    skeleton = "() => getComputedStyle(document.getElementById('plot-reward'), '::before').animationName"
    assert page.evaluate(skeleton) == "breathe"
    is_open.append(True)
    for route in held:
        route.continue_()
    page.wait_for_selector("#plot-reward .main-svg >> nth=0")
    page.wait_for_selector("#samples .sample")


def test_what_deletes_comes_last_and_keys_of_the_timeline_need_no_focus(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/timeline")
    page.wait_for_function("() => document.getElementById('range').textContent.includes('step')")
    expect(page.locator(".page-head .actions > :not([hidden])").last).to_have_text("Delete")
    before = page.inner_text("#range")
    page.keyboard.press("0")
    page.wait_for_function("before => document.getElementById('range').textContent !== before", arg=before)
    page.goto(f"/runs/{two_runs[1]}/timeline?window=10-12")
    page.wait_for_selector("#explain strong:not(:empty)")
    words = page.inner_text("#explain strong")
    assert any(f"step {n}" in words for n in (11, 12)), "the gap that is explained is in the window"


def test_every_metric_has_a_chart_that_is_drawn_when_scrolled_to(visit, platform):
    run_id = platform.submit("letters custom", steps=30)
    supervisor, story = platform.start(run_id)
    events = list(story.tell(12))
    for event in events:
        if event.kind == "step":
            event.metrics.update({f"custom/part_{n:03}/value": n + event.step / 10 for n in range(300)})
    supervisor.tell(events)
    visitor = visit()
    page = visitor.page
    asked = []
    page.on("request", lambda request: asked.append(request.url) if "custom" in request.url else None)
    page.goto(f"/runs/{run_id}")
    page.wait_for_selector("#metric-groups .metric >> nth=300", state="attached")
    reported = page.evaluate("async () => Object.keys((await import('/static/js/run/store.js')).run.summary.latest)")
    named = page.locator("#metric-groups h3").evaluate_all("all => all.map((node) => node.title)")
    assert sorted(named) == sorted(reported)
    assert not [url for url in asked if "part_299" in url], "charts out of view are not fetched"
    page.fill("#metric-search", "part_29[0-9]|^objective/")
    page.wait_for_function("() => document.querySelectorAll('.metric:not([hidden])').length === 10 + 1")
    expect(page.locator("#metric-count")).to_contain_text("11 of ")
    page.locator("[data-key='custom/part_299/value']").scroll_into_view_if_needed()
    page.wait_for_selector("[data-key='custom/part_299/value'] .main-svg >> nth=0")
    card = page.locator(".metric", has=page.locator("[data-key='custom/part_299/value']"))
    expect(card.locator(".reading b")).to_have_text("300")
    supervisor.tell(list(story.tell(3)))
    page.fill("#metric-search", "no such [")
    expect(page.locator("#metrics-none")).to_be_visible()
    page.fill("#metric-search", "")
    visitor.fits()
