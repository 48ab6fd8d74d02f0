"""The charts of all metrics on a run's page: found, drawn when scrolled to, and drawn large."""

from __future__ import annotations

import math

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import wait_until
from tests.browser.test_pinned_charts import opened

pytestmark = pytest.mark.browser


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


HELD_DRAWING = """() => {
  const { react } = window.Plotly;
  const held = new Promise((done) => { window.release = done; });
  window.Plotly.react = async (...chart) => (await held, react(...chart));
}"""


def with_previews(visit, run_id):
    """The run's page with previews in view, and the panels that have one; `release()` in the page lets Plotly draw."""
    page = visit(viewport={"width": 1440, "height": 500}).page
    page.goto(f"/runs/{run_id}")
    page.wait_for_selector("#plot-reward .nsewdrag")
    page.evaluate(HELD_DRAWING)
    page.locator("#metric-groups").evaluate("(groups) => groups.scrollIntoView()")
    panels = page.locator(".metric", has=page.locator(".preview path.curve"))
    wait_until(lambda: page.wait_for_timeout(20) or panels.count() >= 4, "few curves", within_s=30)
    return page, panels


def test_all_curves_in_view_are_seen_before_plotly_draws_them_one_by_one(visit, two_runs):
    page, _ = with_previews(visit, two_runs[0])
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


ADDED = """async ([keys, axis, zoomed, replies]) => {
  const { metricColumns } = await import("/static/js/run/metric-columns.js");
  const send = window.fetch;
  const asked = [];
  window.fetch = async (url, options) => {
    if (!url.includes(`keys=${keys[0]}`)) return send(url, options);
    asked.push(Object.fromEntries(new URL(url, location.href).searchParams));
    return new Response(JSON.stringify(replies[Math.min(asked.length, replies.length) - 1]), {
      headers: { "content-type": "application/json" } });
  };
  const columns = metricColumns({ axis, zoomed }, 400);
  while ((await columns.load(keys, "1 20000")).length);
  const first = asked.length;
  while ((await columns.load(keys, "2 20000")).length);
  window.fetch = send;
  return [asked.slice(0, first), asked.slice(first)];
}"""


def merged(last, rows=400):
    """A column of merged steps."""
    step = [last * (i + 1) // rows for i in range(rows)]
    return {"step": step, "x": step, "y": [1.0] * rows, "low": [0.0] * rows, "high": [2.0] * rows}


def test_a_zoom_is_finer_also_beside_a_metric_that_ended_earlier_and_another_attempt_is_read_anew(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#metric-groups .metric >> nth=3", state="attached")
    reply = {"series": {"long": merged(20_000), "ended": merged(1000)}}
    first, again = page.evaluate(ADDED, [["long", "ended"], "step", [15_000, 16_000], [reply]])
    assert [request.get("keys") for request in first] == ["long,ended", "long"]
    assert 14_900 <= int(first[1]["since_step"]) < 15_000
    assert 16_000 <= int(first[1]["to_step"]) <= 16_100
    assert len(again) == 2, "the second attempt may have trained the same steps again"


def run_with_metrics(platform, name, custom, steps=6):
    """A run with metrics of its own. `custom`: metrics by step."""
    run_id = platform.submit(name, steps=30)
    supervisor, story = platform.start(run_id)
    events = list(story.tell(steps))
    for event in events:
        if event.kind == "step":
            event.metrics.update(custom(event.step))
    supervisor.tell(events)
    return run_id, supervisor, story


TRACES = """() => document.querySelector("[data-key='custom/sometimes']").data?.map(
  ({ mode, marker, x }) => [mode, marker?.size, x.length])"""


def test_values_between_nan_are_dots_and_the_heading_of_a_metric_that_became_nan_has_no_value(visit, platform):
    def custom(step):
        return {"custom/sometimes": 1.0 + step if step % 2 else math.nan, "custom/lost": 2.0 if step < 4 else math.nan}

    run_id, _, _ = run_with_metrics(platform, "letters sometimes", custom, steps=7)
    page = visit(viewport={"width": 1440, "height": 900}).page
    held = []
    page.route("**/vendor/plotly*", lambda route: held.append(route))
    page.goto(f"/runs/{run_id}")
    card = page.locator(".metric[data-name='custom/sometimes']")
    card.wait_for()
    card.scroll_into_view_if_needed()
    card.locator(".preview path.curve").first.wait_for(state="attached")
    assert card.locator(".preview path.curve").first.get_attribute("d").count("h0") == 4
    held.pop().continue_()
    page.wait_for_function(f"() => ({TRACES})()?.length")
    line, _, crosses = page.evaluate(TRACES)
    assert line == ["lines+markers", [6, 0, 6, 0, 6, 0, 6], 7]
    assert crosses == ["markers", 7, 3]
    expect(card.locator(".reading b")).to_have_text("8.00")
    expect(page.locator(".metric[data-name='custom/lost'] .reading b")).to_have_text("–")


PANEL = """async ([column, log]) => {
  const { metricPanel } = await import("/static/js/run/metric-panel.js");
  const { loadPlotly } = await import("/static/js/charts/plotly.js");
  const { view } = await import("/static/js/run/training-view.js");
  await loadPlotly();
  const columns = { get: () => column, whole: () => column };
  const panel = metricPanel({ title: "", keys: ["merged"], log }, { view, columns });
  document.querySelector("main").append(panel.node);
  await panel.draw();
  const lines = panel.plot.data.filter((trace) => trace.mode.startsWith("lines") && trace.line.width === 1);
  const crosses = panel.plot.data.filter((trace) => trace.mode === "markers").flatMap(({ x }) => x);
  const { annotations, yaxis } = panel.plot.layout;
  const result = [lines[0].y, crosses, annotations.map(({ text }) => text), yaxis.range];
  panel.purge();
  panel.node.remove();
  return result;
}"""


@pytest.mark.parametrize("log", [False, True])
def test_merged_steps_of_which_one_is_nan_are_drawn_half_way_between_their_extremes(visit, two_runs, log):
    page = visit().page
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#metric-groups .metric >> nth=3", state="attached")
    step = [10, 20, 30]
    column = {"step": step, "x": step, "y": [None, 4, None], "low": [1, 3, None], "high": [2, 5, None]}
    assert page.evaluate(PANEL, [column, log])[:3] == [[1.5, 4, None], [30], []]


def test_rounding_of_a_constant_is_not_spread_over_the_chart(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#metric-groups .metric >> nth=3", state="attached")
    step = [1, 2, 3]
    for y, shown in (([0.01, 0.0099999998, 0.01], (0.009, 0.011)), ([0.01, 0.0101, 0.01], (0.00999, 0.01011))):
        low, high = page.evaluate(PANEL, [{"step": step, "x": step, "y": y}, False])[3]
        assert (low, high) == pytest.approx(shown, rel=1e-3)


def test_what_is_there_is_drawn_while_a_request_for_other_metrics_hangs(visit, platform):
    run_id, _, _ = run_with_metrics(platform, "letters hung", lambda step: {f"custom/part_{n:03}": n + step for n in range(60)})
    page, held = visit(viewport={"width": 1440, "height": 900}).page, []
    page.goto(f"/runs/{run_id}")
    early, late = (page.locator(f"[data-key='custom/part_{n:03}']") for n in (0, 59))
    early.wait_for(state="attached")
    early.scroll_into_view_if_needed()
    early.locator(".main-svg").first.wait_for()
    page.route("**/metrics?keys=*part_059*", lambda route: held.append(route))
    late.scroll_into_view_if_needed()
    wait_until(lambda: page.wait_for_timeout(20) or held, "the last metric is not requested", 30)
    expect(early.locator(".main-svg")).to_have_count(0)
    early.scroll_into_view_if_needed()
    early.locator(".main-svg").first.wait_for()
    page.locator("#smoothing").evaluate("(slider) => { slider.value = 0; slider.dispatchEvent(new Event('input')); }")
    page.wait_for_function("() => document.querySelector(`[data-key='custom/part_000']`).data[1].visible === false")
    held.pop().continue_()


def test_a_chart_that_waits_keeps_its_preview_when_another_axis_is_chosen(visit, two_runs):
    (page, panels), held = with_previews(visit, two_runs[0]), []
    page.route("**/metrics?*x=wall*", lambda route: held.append(route))
    page.locator("[data-axis=wall]").evaluate("(button) => button.click()")
    page.evaluate("window.release()")
    wait_until(lambda: page.wait_for_timeout(20) or held, "the other axis is not requested", 30)
    page.wait_for_selector(".metric .main-svg >> nth=0")
    page.wait_for_timeout(300)
    assert panels.count() >= 3
    while held:
        held.pop().continue_()
    page.unroute("**/metrics?*x=wall*")
    page.wait_for_function("() => !document.querySelector('.preview')")


LISTENERS = """() => {
  const { addEventListener } = EventTarget.prototype;
  window.listeners = 0;
  EventTarget.prototype.addEventListener = function (type, ...more) {
    if (type === "mouseleave" && this.dataset?.key === "critic/vf_loss") window.listeners += 1;
    return addEventListener.call(this, type, ...more);
  };
}"""


def test_a_chart_that_comes_back_into_view_listens_once(visit, two_runs):
    page = visit(viewport={"width": 1440, "height": 500}).page
    page.goto(f"/runs/{two_runs[0]}")
    page.evaluate(LISTENERS)
    chart = page.locator("[data-key='critic/vf_loss']")
    for _ in range(3):
        chart.scroll_into_view_if_needed()
        chart.locator(".main-svg").first.wait_for()
        page.evaluate("scrollTo(0, 0)")
        expect(chart.locator(".main-svg")).to_have_count(0)
    assert page.evaluate("window.listeners") == 1


def test_steps_that_a_run_ended_with_while_plotly_was_read_are_drawn(visit, platform):
    run_id, supervisor, story = run_with_metrics(platform, "letters ending", lambda step: {}, steps=4)
    page, held = visit().page, []
    page.route("**/vendor/plotly*", lambda route: held.append(route))
    page.goto(f"/runs/{run_id}")
    page.wait_for_selector("#plot-reward .preview path.curve >> nth=0", state="attached")
    supervisor.tell([*story.tell(2), *story.end()])
    supervisor.end("succeeded")
    page.wait_for_selector("#run .pill[data-state=succeeded]")
    wait_until(lambda: page.wait_for_timeout(20) or held, "Plotly is not requested", 30)
    held.pop().continue_()
    page.wait_for_function("() => document.getElementById('plot-reward').data?.[0].x.at(-1) === 6")


def test_full_screen_says_what_is_wrong_and_follows_the_theme(visit, two_runs):
    visitor = visit()
    visitor.expects("Failed to load resource")
    page = visitor.page
    page.goto(f"/runs/{two_runs[0]}")
    page.wait_for_selector("#metric-groups .metric >> nth=3", state="attached")
    page.route("**/metrics?*max_points=2000*", lambda route: route.fulfill(status=404, json={"detail": "No such run."}))
    opened(page, "actor/entropy").get_by_text("Full screen", exact=True).click()
    expect(page.locator("dialog.full [role=status]")).to_have_text("No such run.")
    page.keyboard.press("Escape")
    page.unroute("**/metrics?*max_points=2000*")
    opened(page, "actor/entropy").get_by_text("Full screen", exact=True).click()
    colour = "() => document.querySelector('dialog.full .plot-full').layout?.font.color"
    page.wait_for_function(colour)
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"(light) => ({colour})() !== light", arg=light)


UNANSWERED = """async () => {
  const { get } = await import("/static/js/core/api.js");
  const { timeout } = AbortSignal;
  AbortSignal.timeout = () => AbortSignal.abort(new DOMException("late", "TimeoutError"));
  const asked = [get("runs"), get("runs", {}, new AbortController().signal)];
  AbortSignal.timeout = timeout;
  return (await Promise.allSettled(asked)).map(({ reason }) => reason?.constructor.name);
}"""


def test_a_read_that_is_not_answered_in_time_fails_as_without_a_server(visit, two_runs):
    page = visit().page
    page.goto("/runs")
    assert page.evaluate(UNANSWERED) == ["TypeError", "TypeError"]
