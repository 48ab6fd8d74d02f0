"""The run page while it loads, its keys, and the charts of the Training tab."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import wait_until
from tests.browser.test_run_page import points_drawn

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


def test_the_explained_gap_stays_in_the_window_while_the_timeline_follows(visit, platform):
    run_id = platform.submit("letters followed", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(4)))
    page = visit().page
    page.goto(f"/runs/{run_id}/timeline")
    explained = page.locator("#explain strong")
    for first, last in ((3, 4), (7, 8)):
        page.wait_for_selector(f"#range >> text=steps {first}–{last}")
        expect(explained).to_have_text(re.compile(f" in step [{first}{last}]$"))
        supervisor.tell(list(story.tell(4)))
    page.wait_for_selector("#range >> text=steps 11–12")
    page.locator("#worst button").first.click()
    chosen = explained.inner_text()
    page.click("#follow")
    page.wait_for_selector("#follow[aria-pressed=true]")
    supervisor.tell(list(story.tell(2)))
    page.wait_for_selector("#range >> text=steps 13–14")
    expect(explained).to_have_text(chosen)


EMA = """async ([y, weight]) => {
  const { ema } = await import("/static/js/charts/plotly-theme.js");
  return ema(y, weight);
}"""


def test_smoothing_is_the_bias_corrected_mean_and_keeps_a_constant(visit, two_runs):
    page = visit().page
    page.goto("/runs")
    assert page.evaluate(EMA, [[0.03] * 1000, 0.6]) == [0.03] * 1000
    y, mean, weights = [3.0, None, -1.0, 0.5, 8.0], 0.0, 0.0
    smoothed = page.evaluate(EMA, [y, 0.9])
    for value, at in zip(y, smoothed, strict=True):
        if value is None:
            assert at is None
            continue
        mean, weights = 0.9 * mean + 0.1 * value, 0.9 * weights + 0.1
        assert at == pytest.approx(mean / weights, rel=1e-12)


def test_the_first_step_is_seen_as_dots(visit, platform):
    run_id = platform.submit("letters begun", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(1)))
    page = visit(viewport={"width": 1440, "height": 2600}).page
    page.goto(f"/runs/{run_id}")
    for plot in ("#plot-reward", "#plot-kl", "[data-key='critic/vf_loss']"):
        dot = page.locator(plot).locator(".points path").first
        expect(dot).to_be_attached()
        assert dot.bounding_box()["width"] > 4
    supervisor.tell(list(story.tell(1)))
    expect(page.locator("#plot-reward .points path")).to_have_count(0)


def test_headings_show_the_values_at_the_cursor_also_after_the_next_step(visit, platform):
    run_id = platform.submit("letters pointed at", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(4)))
    page = visit(viewport={"width": 1440, "height": 2600}).page
    page.goto(f"/runs/{run_id}")
    page.wait_for_selector("#plot-reward .nsewdrag")
    page.wait_for_selector("#metric-groups .metric .nsewdrag >> nth=2")
    step = re.compile(r" · step 3$")
    box = page.locator("#plot-reward .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 60)  # the axis ends at step 10 until step 9
    expect(page.locator("#by-reward")).to_have_text(step)
    panel = page.locator(".metric", has=page.locator("[data-key='critic/score/mean']"))
    value = panel.locator(".reading b").inner_text()
    supervisor.tell(list(story.tell(2)))
    points_drawn(page, 6)
    panel.locator(".js-plotly-plot").evaluate(
        "(plot) => new Promise((done) => setInterval(() => plot.data.at(-1).x.at(-1) === 6 && done(), 50))"
    )
    expect(page.locator("#by-reward")).to_have_text(step)
    assert panel.locator(".reading b").inner_text() == value
    expect(page.locator("#plot-entropy line.linked-cursor[visibility=visible]")).to_have_count(1)
    page.mouse.move(5, 5)
    expect(page.locator("#by-reward")).not_to_have_text(step)
    expect(panel.locator(".reading b")).not_to_have_text(value)


MERGED = """() => {
  const send = window.fetch;
  const column = (from, to, by, more = {}) => {
    const step = Array.from({ length: Math.floor((to - from) / by) + 1 }, (_, i) => from + i * by);
    return { step, x: step, y: step, ...more };
  };
  window.fetch = async (url, options) => {
    const { pathname, searchParams } = new URL(url, location.href);
    if (!pathname.endsWith("/metrics")) return send(url, options);
    const [from, to] = ["since_step", "to_step"].map((name) => Number(searchParams.get(name)));
    const whole = column(100, 20000, 100);
    const rows = to ? column(from + 1, to, 1) : { ...whole, low: whole.y, high: whole.y };
    const keys = searchParams.get("keys").split(",").filter((key) => !key.includes("*"));
    const body = JSON.stringify({ series: Object.fromEntries(keys.map((key) => [key, rows])), last_step: 20000 });
    return new Response(body, { headers: { "content-type": "application/json" } });
  };
}"""


def test_headings_show_the_newest_value_of_the_run_also_while_its_start_is_zoomed(visit, two_runs):
    page = visit(viewport={"width": 1440, "height": 4000}).page
    page.add_init_script(f"({MERGED})(); localStorage.setItem('oppo-smoothing', 0);")
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#plot-kl .nsewdrag")
    panel = page.locator(".metric", has=page.locator("[data-key='objective/kl']"))
    panel.locator(".nsewdrag").wait_for()
    expect(page.locator("#at-kl")).to_have_text("20000.00")
    heading = panel.locator(".reading b")
    newest = heading.inner_text()
    box = page.locator("#plot-kl .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 60)
    expect(page.locator("#at-kl")).not_to_have_text("20000.00")
    expect(heading).not_to_have_text(newest)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 62, steps=4)
    expect(page.locator("#at-kl")).to_have_text("20000.00")  # the drag is no cursor
    page.mouse.up()
    page.mouse.move(5, 5)
    fine = "(plot) => new Promise((done) => setInterval(() => plot.data.at(-1).x[1] - plot.data.at(-1).x[0] === 1 && done(), 50))"
    page.locator("#plot-kl").evaluate(fine)
    panel.locator(".js-plotly-plot").evaluate(fine)
    hover = "(plot) => plot.emit('plotly_hover', { points: [{ x: 207 }] })"  # as a redraw may repeat it
    page.locator("#plot-kl").evaluate(hover)
    expect(page.locator("#at-kl")).to_have_text("20000.00")
    expect(heading).to_have_text(newest)


def test_a_double_click_takes_back_a_zoom_of_the_y_axis_alone(visit, two_runs):
    page = visit(viewport={"width": 1440, "height": 2600}).page
    page.goto(f"/runs/{two_runs[0]}")
    area = page.locator("#metric-groups .metric .nsewdrag").first
    area.wait_for()
    page.wait_for_selector("#plot-reward .nsewdrag")
    plot = page.locator("#metric-groups .metric .js-plotly-plot").first
    height = "(plot) => plot._fullLayout.yaxis.range[1] - plot._fullLayout.yaxis.range[0]"
    whole = plot.evaluate(height)
    box = area.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 61, box["y"] + 40, steps=4)
    page.mouse.up()
    wait_until(lambda: page.wait_for_timeout(20) or plot.evaluate(height) < whole / 2, "the chart is not zoomed", 30)
    plot.evaluate("(plot) => { plot._mouseDownTime = 0; }")  # the drag is not the first of the clicks
    area.dblclick()
    wait_until(lambda: page.wait_for_timeout(20) or plot.evaluate(height) == whole, "the chart stays zoomed", 30)


def test_one_cursor_and_one_zoom_for_all_charts(visit, two_runs):
    page = visit(viewport={"width": 1440, "height": 2600}).page
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#plot-reward .nsewdrag")
    page.wait_for_selector("#metric-groups .metric .nsewdrag >> nth=2")
    box = page.locator("#plot-reward .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 60)
    page.wait_for_function(
        "() => [...document.querySelectorAll('#plot-entropy, #metric-groups .metric .js-plotly-plot')].slice(0, 3)"
        ".every(plot => plot.querySelector('line.linked-cursor')?.getAttribute('visibility') === 'visible')"
    )
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 62, steps=4)
    page.mouse.up()
    page.wait_for_function(
        "() => { const end = (node) => node._fullLayout.xaxis.range[1].toFixed(3);"
        " const at = end(document.getElementById('plot-reward'));"
        " return [...document.querySelectorAll('#metric-groups .metric .js-plotly-plot')].slice(0, 3)"
        ".every(plot => end(plot) === at); }"
    )
    page.locator("#metric-groups .metric .nsewdrag").first.dblclick()
    page.wait_for_function(
        "() => [...document.querySelectorAll('#plot-reward, #metric-groups .metric .js-plotly-plot')].slice(0, 3)"
        ".every(plot => plot._fullLayout.xaxis.range[0] === 0 && plot._fullLayout.xaxis.range[1] >= 60)"
    )
