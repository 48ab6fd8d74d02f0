"""The run page while it loads, its keys, and the charts of all metrics."""

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
    newest = "[...document.querySelectorAll('.metric:not([hidden]) .js-plotly-plot')].map((plot) => plot.data[0].x.at(-1))"
    page.wait_for_function(f"() => {newest}.includes(15)")
    page.fill("#metric-search", "no such [")
    expect(page.locator("#metrics-none")).to_be_visible()
    page.fill("#metric-search", "")
    visitor.fits()


def test_all_curves_in_view_are_seen_before_plotly_draws_them_one_by_one(visit, two_runs):
    page = visit(viewport={"width": 1440, "height": 500}).page
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#plot-reward .nsewdrag")
    page.evaluate("""() => {
      const { react } = window.Plotly;
      const held = new Promise((done) => { window.release = done; });
      window.Plotly.react = async (...chart) => (await held, react(...chart));
    }""")
    page.locator("#metric-groups").evaluate("(groups) => groups.scrollIntoView()")
    panels = page.locator(".metric", has=page.locator(".preview path.curve"))
    wait_until(lambda: page.wait_for_timeout(20) or panels.count() >= 4, "few curves", within_s=30)
    plot = page.locator("[data-key='critic/vf_loss']")
    before = plot.locator("path.curve").last.bounding_box()
    page.evaluate("window.release()")
    after = plot.locator(".js-line").last.bounding_box()
    assert all(abs(before[side] - after[side]) <= 5 for side in ("x", "y", "width", "height")), (before, after)
    page.wait_for_function("() => !document.querySelector('.preview')")


def test_metrics_in_view_are_seen_before_plotly_is_read_and_full_screen_waits_for_it(visit, two_runs):
    page, held = visit(viewport={"width": 1440, "height": 900}).page, []
    page.route("**/vendor/plotly*", lambda route: held.append(route))
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#metric-groups .metric >> nth=0")
    page.locator("#metric-groups").evaluate("(groups) => groups.scrollIntoView()")
    card = page.locator("[data-name='critic/vf_loss']")
    card.locator(".preview path.curve").first.wait_for(state="attached")
    assert card.locator(".reading b").inner_text() not in ("", "–")
    card.locator("summary").click()
    card.get_by_role("button", name="Full screen").click()
    dialog = page.locator("dialog.full[open]")
    expect(dialog.locator(".plot-full")).to_be_visible()
    dialog.locator(".preview path.curve").first.wait_for(state="attached")
    assert len(held) == 1
    assert not page.locator(".js-plotly-plot").count()
    held.pop().continue_()
    expect(dialog.locator(".js-line").first).to_be_attached()
    page.keyboard.press("Escape")
    card.locator(".js-line").first.wait_for(state="attached")
    expect(card.locator(".preview")).to_have_count(0)


def test_a_request_for_metrics_in_view_that_hangs_does_not_keep_the_other_charts_from_being_drawn(visit, two_runs):
    page = visit(viewport={"width": 1440, "height": 2600}).page
    page.route("**/metrics?keys=actor*", lambda route: None)
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("[data-name='actor/entropy']")
    page.wait_for_selector("#plot-reward .nsewdrag")
    expect(page.locator("[data-name='actor/entropy'] :is(.preview, .main-svg)")).to_have_count(0)
    page.unroute("**/metrics?keys=actor*")


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
    box = page.locator("#plot-kl .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 60)
    expect(page.locator("#at-kl")).not_to_have_text("20000.00")
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
    expect(panel.locator(".reading b")).to_have_text("20,000")


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


NEXT_STEP = """async () => {
  const { run } = await import("/static/js/run/store.js");
  run.take({ ...run.summary, step: run.summary.step + 1 });
}"""


def test_a_chart_in_full_screen_is_drawn_although_requests_take_longer_than_a_step(visit, two_runs):
    page = visit().page
    held = []
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#metric-groups .metric >> nth=3", state="attached")
    page.route(lambda url: "keys=actor%2Fentropy&x=step&max_points=2000" in url, lambda route: held.append(route))
    opened(page, "actor/entropy").get_by_text("Full screen", exact=True).click()
    for _ in range(2):
        wait_until(lambda: page.wait_for_timeout(20) or held, "the chart is not requested", 30)
        page.evaluate(NEXT_STEP)
        page.evaluate(NEXT_STEP)
        assert len(held) == 1, "one request at a time"
        held.pop().continue_()
        page.wait_for_selector("dialog.full .main-svg >> nth=0")
    page.unroute_all(behavior="ignoreErrors")


RENEWED = """async () => {
  const { run } = await import("/static/js/run/store.js");
  const { metricColumns } = await import("/static/js/run/metric-columns.js");
  const { panelDrawer } = await import("/static/js/run/panel-drawer.js");
  const send = window.fetch;
  let [asked, drawn] = [0, 0];
  window.fetch = async (url, options) => {
    if (!url.includes("keys=slow")) return send(url, options);
    asked += 1;
    run.take({ ...run.summary, step: run.summary.step + 1 });
    const body = JSON.stringify({ series: { slow: { step: [1], x: [1], y: [1] } } });
    return new Response(body, { headers: { "content-type": "application/json" } });
  };
  const plot = document.querySelector("h1");
  const panel = { plot, chart: { keys: ["slow"] }, preview() {}, purge() {}, read() {}, draw: async () => (drawn += 1) };
  const drawer = panelDrawer(metricColumns({ axis: "step", zoomed: null }, 400));
  drawer.link({ add() {}, remove() {} });
  drawer.watch(panel);
  while (!drawn) await new Promise((done) => setTimeout(done));
  for (let i = 0; i < 50; i++) await new Promise((done) => setTimeout(done));
  window.fetch = send;
  return [asked, drawn];
}"""


def test_charts_are_requested_once_although_every_request_takes_longer_than_a_step(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#metric-groups .metric >> nth=3", state="attached")
    assert page.evaluate(RENEWED) == [1, 1]


def opened(page, name):
    """Open the menu of a metric's card."""
    card = page.locator(f".metric[data-name='{name}']").last
    card.scroll_into_view_if_needed()
    card.locator("summary").click()
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
    with page.expect_response("**/charts"):
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
