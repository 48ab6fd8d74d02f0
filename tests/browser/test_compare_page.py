"""The compare page with more runs than one can tell apart. After the other files: they count the runs of the list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import spec_data, wait_until

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def nine_runs(platform, two_runs):
    """Four sequential runs and five of OPPO, each with several seeds; the added ones are short."""
    seeds = [(seed, overlap) for seed in (2, 3, 4) for overlap in (False, True)] + [(5, True)]
    return [
        *two_runs,
        *(platform.trained(f"seed {seed} {overlap}", overlap=overlap, steps=8, seed=seed) for seed, overlap in seeds),
    ]


def saved(page, selector):
    """What a click makes the browser save: its name and its text."""
    with page.expect_download() as download:
        page.click(selector)
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def named(page, *names):
    """Wait until the legend of the reward chart names these curves."""
    shown = "document.getElementById('plot-reward').data?.filter(t => t.showlegend).map(t => t.name)"
    page.wait_for_function(f"names => JSON.stringify({shown}) === JSON.stringify(names)", arg=list(names))


def end_of(name):
    """Where the x axis of a chart ends, as a function in the page."""
    return f"(() => document.getElementById('plot-{name}')._fullLayout?.xaxis.range[1])"


def dragged(page, name):
    """Zoom into a chart: from 60 to 260 pixels."""
    box = page.locator(f"#plot-{name} .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 260, box["y"] + 42, steps=4)
    page.mouse.up()


def test_curves_and_figures_are_seen_before_plotly_is_read_and_a_download_waits_for_it(visit, two_runs):
    page, held = visit().page, []
    page.route("**/vendor/plotly*", lambda route: held.append(route))
    page.goto(f"/compare?runs={','.join(map(str, two_runs))}")
    curve = page.locator("#plot-reward .preview path.curve").last
    curve.wait_for()
    before = curve.bounding_box()
    expect(page.locator("#figures tr")).to_have_count(2)
    expect(page.locator("#values tr")).to_have_count(2)
    expect(page.locator("#cursor")).to_be_disabled()
    page.click("[data-chart=kl][data-image=png]")
    wait_until(lambda: page.wait_for_timeout(20) or held, "Plotly is not asked for", within_s=30)
    with page.expect_download() as download:
        for route in held:
            route.continue_()
        page.wait_for_selector("#plot-reward .main-svg .js-line")
    assert download.value.suggested_filename == "compare-kl.png"
    assert page.locator(".preview").count() == 0
    expect(page.locator("#cursor")).to_be_enabled()
    after = page.locator("#plot-reward .main-svg .js-line").last.bounding_box()
    assert all(abs(before[side] - after[side]) <= 5 for side in ("x", "y", "width", "height")), (before, after)


def test_a_refused_choice_does_not_keep_the_charts_from_being_drawn(visit, two_runs):
    visitor = visit()
    visitor.expects("404")
    page, held = visitor.page, []
    page.route("**/vendor/plotly*", lambda route: held.append(route))
    page.goto(f"/compare?runs={','.join(map(str, two_runs))}&outliers=ignore")
    page.wait_for_selector("#plot-reward .preview path.curve")
    page.route("**/api/v1/compare?*", lambda route: route.fulfill(status=404, json={"message": "no such run"}))
    page.click("[data-axis=step]")
    page.wait_for_selector("#refused:not([hidden])")
    wait_until(lambda: page.wait_for_timeout(20) or held, "Plotly is not asked for", within_s=30)
    for route in held:
        route.continue_()
    page.wait_for_selector("#plot-reward .main-svg .js-line")
    expect(page.locator("#refused")).to_be_visible()


def test_a_preview_needs_no_zoom_and_plotly_is_asked_for_again_when_it_could_not_be_read(visit, two_runs):
    visitor = visit()
    visitor.expects("ERR_FAILED")
    page, asked = visitor.page, []

    def fail_once(route):
        asked.append(route)
        route.abort() if len(asked) == 1 else route.continue_()

    page.route("**/vendor/plotly*", fail_once)
    page.goto(f"/compare?runs={','.join(map(str, two_runs))}&zoom=10,20")
    page.wait_for_selector("#figures tr")
    page.locator("#live").filter(has_text="econnect").wait_for()
    assert page.locator(".preview").count() == 0, "it would show the whole run"
    page.wait_for_selector("#plot-reward .main-svg .js-line")
    assert len(asked) == 2


@pytest.mark.full
def test_long_names_of_groups_are_not_wider_than_a_phone(visit, nine_runs):
    visitor = visit(viewport={"width": 320, "height": 700})
    visitor.page.goto(f"/compare?runs={','.join(map(str, nine_runs))}&group=-seed")
    visitor.page.wait_for_selector("#legend li >> text=intra_step per_chunk")
    visitor.page.wait_for_selector("#groups tr >> nth=1")
    visitor.fits()


def test_many_runs_are_faint_but_one_and_every_choice_is_in_the_address(visit, nine_runs):
    page = visit().page
    page.goto(f"/compare?runs={','.join(map(str, nine_runs))}&x=step")
    page.wait_for_selector("#plot-reward .main-svg")
    named(page)
    page.hover(f"#figures tr[data-key='{nine_runs[3]}']")
    expect(page.locator("svg.outlined"), "the run under the pointer, in every chart").to_have_count(3)
    page.locator(f"[aria-label='Highlight seed 2 True #{nine_runs[3]}']").focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**&highlight={nine_runs[3]}")
    named(page, f"seed 2 True #{nine_runs[3]}")
    expect(page.locator("#counted")).to_be_visible()
    expect(page.locator(f"[aria-label='Highlight seed 2 True #{nine_runs[3]}']")).to_be_focused()
    expect(page.locator("#parallel path[data-key]")).to_have_count(9)
    page.select_option("#group", "overlap.intra_step")
    page.wait_for_selector("#groups tr >> nth=1")
    named(page, "off · 4", "per_chunk · 5")
    expect(page.locator("#groups tr").first).to_contain_text("3 of 4")
    page.fill("#target", "0.2")
    page.press("#target", "Enter")
    page.wait_for_selector("#groups >> text=5 of 5")
    expect(page.locator("#groups tr").nth(1).locator("td").nth(5)).to_contain_text("×")
    page.select_option("#baseline", label="per_chunk")
    page.wait_for_url(f"**&baseline={nine_runs[1]}**")
    page.wait_for_selector("#groups tr[data-pinned] >> text=per_chunk")
    address, view = page.url, page.inner_text("#groups")
    page.go_back()
    page.wait_for_selector("#groups tr[data-pinned] >> text=off")
    page.goto(address)
    page.wait_for_selector("#groups tr[data-pinned] >> text=per_chunk")
    page.wait_for_function("view => document.getElementById('groups').innerText === view", arg=view)
    expect(page.locator(".pick[aria-pressed=true]")).to_have_count(1)


def test_every_run_and_group_has_a_colour_or_a_pattern_of_its_own(visit, nine_runs):
    from oppo_platform.pages.templatetags.oppo_format import run_colour, run_pattern

    page = visit().page
    page.goto(f"/compare?runs={','.join(map(str, nine_runs))}&x=step&smooth=0")
    page.wait_for_selector("#plot-reward .main-svg")
    expect(page.locator("#tokens .token")).to_have_count(9)
    look = "nodes => nodes.map((node) => `${node.dataset.run} ${node.dataset.pattern}`)"
    tokens = page.eval_on_selector_all("#tokens .token", look)
    assert len(set(tokens)) == 9
    assert page.eval_on_selector_all("#figures .swatch-line", look) == tokens
    assert page.eval_on_selector_all("#diff-head .swatch-line", look) == tokens
    lines = "document.getElementById('plot-reward').data.filter((t) => t.meta && t.mode === 'lines')"
    drawn = page.evaluate(f"() => {lines}.map((t) => `${{t.line.color}} ${{t.line.dash}}`)")
    assert len(set(drawn)) == 9
    assert tokens[0] == f"{run_colour(nine_runs[0])} {run_pattern(nine_runs[0])}", "as in the list of runs, unless taken"
    many = """async () => {
      const { runColours } = await import("/static/js/compare/runs.js");
      const { entries } = await import("/static/js/compare/curves.js");
      const { runColour } = await import("/static/js/core/dom.js");
      const ids = [...Array(24).keys()].map((i) => 5 * i + 2);
      const groups = ids.map((id) => ({ value: "a", runs: [id], reached: 0 }));
      const looks = entries({ groups }, null).map((e) => `${runColour(e.colour)} ${e.dash}`);
      const distinct = (ids) => new Set(runColours(ids).values()).size;
      return [distinct(ids), new Set(looks).size, distinct([1, 9, 17]), Math.max(...runColours([1, 9, 17]).values())];
    }"""
    assert page.evaluate(many) == [24, 24, 3, 3]


def test_the_ten_highest_of_many_runs_are_those_at_the_end_of_their_curves(visit, two_runs):
    page = visit().page
    page.goto("/compare")
    ranked = """async (picked) => {
      const { values } = await import("/static/js/compare/tables.js");
      const ids = [...Array(12).keys()];
      // the later a run in this order, the higher its end and the lower its beginning; each ends at another step
      const shown = ids.map((id) => ({ x: [0, 5 + id], y: [100 - id, id] }));
      const other = { shown: ids.map(() => ({ x: [], y: [] })) };
      const entries = ids.map((id) => ({ key: id, label: `run ${id}`, colour: 1, dash: 0, ids: [id] }));
      const v = { entries, view: { picked, charts: [] }, drawn: { reward: { shown }, kl: other, bubble: other } };
      const rows = (x) => {
        values({ ...v, axis: { write: String } }, x);
        return [...document.querySelectorAll("#values tr")].map((row) => row.cells[0].textContent);
      };
      return [rows(null), rows(0), document.getElementById("cursor-at").textContent];
    }"""
    at_end, at_start, heading = page.evaluate(ranked, None)
    assert at_end == [f"run {n}" for n in range(11, 1, -1)]
    assert at_start == [f"run {n}" for n in range(10)]
    assert heading == "at 0, the 10 highest of 12"
    assert page.evaluate(ranked, 0)[0] == ["run 0", *(f"run {n}" for n in range(11, 2, -1))]


APART = """() => {
  const boxes = [...document.querySelectorAll("#plot-reward .annotation-text")].map((node) => node.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return [boxes.length, boxes.some((a, i) => boxes.some((b, k) => k > i && meet(a, b)))];
}"""


@pytest.mark.parametrize("target", ["0.2", "0.5", "1.4"])
def test_the_labels_of_drop_lines_do_not_overlap(visit, nine_runs, target):
    page = visit().page
    page.goto(f"/compare?runs={','.join(map(str, nine_runs[:8]))}&x=step&target={target}")
    page.wait_for_selector("#plot-reward .annotation-text")
    reached = page.locator("#figures tr td:nth-child(3)").evaluate_all(
        "cells => cells.filter((c) => c.textContent !== '–').length"
    )
    assert page.evaluate(APART) == [1 + reached, False], "the label of the target, and one for each run that reaches it"


def test_the_labels_of_drop_lines_have_a_unit_that_suits_them(visit, nine_runs):
    page = visit().page
    page.goto(f"/compare?runs={','.join(map(str, nine_runs[:3]))}&x=wall&target=0.2")
    page.wait_for_selector("#plot-reward .annotation-text >> nth=1")
    labels = page.locator("#plot-reward .annotation-text").all_text_contents()
    times = [label for label in labels if "target" not in label]
    assert times
    assert all(re.fullmatch(r"\d+(\.\d+)? s|\d+ (m|h) \d+ (s|m)", time) for time in times), labels


def test_a_setting_that_was_computed_is_written_as_one_would_enter_it(visit, platform):
    from oppo_contract.spec import load_spec
    from oppo_platform.runs.services import submit_run

    platform.fleet.beat()
    data = spec_data("letters rate", overlap=True, steps=20)
    specs = [load_spec(data | {"ppo": {"learning_rate": rate}}) for rate in (10 * 5e-7, 3e-4)]
    ids = [submit_run(platform.user, platform.project, spec).pk for spec in specs]
    page = visit().page
    page.goto(f"/compare?runs={ids[0]},{ids[1]}")
    row = page.locator("#diff tr", has_text="ppo.learning_rate")
    expect(row.locator("td")).to_have_text(["ppo.learning_rate", "5e-06", "0.0003"])


def test_the_zoom_is_in_the_address(visit, two_runs):
    page = visit().page
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}&x=step&target=0.5")
    page.wait_for_selector("#plot-reward .main-svg")
    dragged(page, "reward")
    page.wait_for_url("**&zoom=*")
    page.wait_for_function(f"() => {end_of('bubble')}() < 50")
    end, other = (page.evaluate(end_of(name)) for name in ("reward", "bubble"))
    assert end == pytest.approx(other)
    same = f"was => Math.abs({end_of('bubble')}() - was) < 0.01"
    page.reload()
    page.wait_for_function(same, arg=end)
    page.locator("#plot-kl .nsewdrag").dblclick()
    page.wait_for_function(f"() => {end_of('reward')}() > 59")
    page.wait_for_url(lambda url: "zoom" not in url)
    page.go_back()
    page.wait_for_function(same, arg=end)
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}&zoom=9,3&outliers=x&counted=2")
    page.wait_for_selector("#plot-reward .main-svg")
    page.wait_for_url(lambda url: "zoom" not in url)


# The counted curves cross the target (0.5) at the steps that the table tells.
CROSSING = """() => {
  const curves = document.getElementById('plot-reward').data.filter((t) => t.meta);
  const told = [...document.querySelectorAll('#figures tr td:nth-child(3)')].map((td) => Number(td.textContent));
  return curves.length === 2 && curves.map((t) => t.x[t.y.findIndex((y) => y >= 0.5)]).join() === told.join();
}"""


def test_outliers_and_what_counts_are_in_the_address(visit, two_runs):
    page = visit().page
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}&x=step&target=0.5")
    page.wait_for_selector("#plot-reward .main-svg")
    page.check("#outliers")
    page.check("#counted")
    page.wait_for_url("**&outliers=ignore&counted=1")
    expect(page.locator("#smoothing")).to_be_disabled()
    read = 'const { read } = await import("/static/js/compare/view.js"); return read(location.search).counted;'
    assert page.evaluate(f"async () => {{ {read} }}")
    page.wait_for_function(CROSSING)


def test_a_fork_begins_at_a_mark_on_its_curve(visit, two_runs):
    page = visit().page
    page.goto("/compare")
    fork = """async () => {
      const { axisOf } = await import("/static/js/charts/axes.js");
      const { build } = await import("/static/js/compare/charts.js");
      const curve = { x: [5, 6], y: [1, 2], raw: [1, 2] };
      const entry = { key: 1, label: "a", ids: [1], colour: 1, dash: 0, group: null };
      const view = { picked: null, smooth: 0, axis: "step", zoom: null, outliers: false, log: [] };
      const reply = { runs: [{ id: 1, forked_from: { run: 2, step: 4 } }], groups: [], target: null };
      const v = { view, reply, colours: new Map([[1, 1]]), axis: axisOf("step", 9), many: false, resets: 0 };
      const made = build("reward", { shown: [{ entry, ...curve }], runs: new Map([[1, curve]]) }, v);
      return made.data.filter((trace) => trace.mode === "markers").map((trace) => [trace.x, trace.y]);
    }"""
    assert page.evaluate(fork) == [[[5], [1]]]


def test_the_cursor_goes_by_keyboard_and_what_is_shown_can_be_taken_away(visit, two_runs):
    page = visit().page
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}&x=step&smooth=0")
    page.wait_for_selector("#plot-reward .main-svg")
    page.focus("#cursor")
    page.keyboard.press("Home")
    for _ in range(6):
        page.keyboard.press("PageUp")
    page.wait_for_selector("#cursor-at >> text=at step 36")
    expect(page.locator("line.linked-cursor[visibility=visible]")).to_have_count(3)
    expect(page.locator("#cursor")).to_have_attribute("aria-valuetext", "at step 36")
    name, text = saved(page, "#csv-curves")
    rows = text.decode().splitlines()
    assert (name, rows[0]) == ("compare-curves.csv", "chart,curve,runs,step,shown,recorded,low,high")
    assert len(rows) == 1 + 3 * 2 * 60
    name, text = saved(page, "#csv-runs")
    assert (name, len(text.decode().splitlines())) == ("compare-runs.csv", 3)
    name, text = saved(page, "[aria-label='Reward as SVG']")
    assert name == "compare-reward.svg"
    assert b"letters oppo" in text
    name, text = saved(page, "[aria-label='Bubble as PNG']")
    assert (name, text[:4]) == ("compare-bubble.png", b"\x89PNG")


def test_curves_of_any_density_are_smoothed_alike_and_formulas_are_text_in_csv(visit, two_runs):
    page = visit().page
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}")
    check = """async () => {
      const C = await import("/static/js/compare/curves.js");
      const { csv } = await import("/static/js/compare/download.js");
      const x = [...Array(1000).keys()], y = x.map((i) => Math.sin(i / 90));
      const half = (list) => list.filter((_, i) => i % 2);
      const fine = half(C.smooth(x, y, 20)), coarse = C.smooth(half(x), half(y), 20);
      const mean = C.averaged([{ x: [0, 4], y: [0, 4] }, { x: [2, 6], y: [4, 8] }, { x: [0, 6], y: [2, 2] }], "range");
      const off = Math.max(...fine.map((v, i) => Math.abs(v - coarse[i])));
      return { off, mean, formula: csv([["=1+1", "a,b", null, -2]]) };
    }"""
    made = page.evaluate(check)
    assert made["off"] < 0.03, "half of the points, the same curve"
    assert made["mean"] == {
        "x": [0, 2, 4, 6],
        "y": [1, 8 / 3, 4, 5],
        "low": [0, 2, 2, 2],
        "high": [2, 4, 6, 8],
        "n": [2, 3, 3, 2],
    }
    assert made["formula"] == '\'=1+1,"a,b",,-2\r\n'


def scaled(page, seconds):
    """Let the longest curve of a comparison end at that time; returns how to change it."""
    ends = {"now": seconds}

    def answer(route):
        reply = route.fetch()
        found = reply.json()
        columns = [column for series in found["series"].values() for column in series.values()]
        by = ends["now"] / max(column["x"][-1] for column in columns)
        for column in columns:
            column["x"] = [x * by for x in column["x"]]
        for hit in filter(None, found["time_to_target"].values()):
            hit["elapsed_s"] *= by
        route.fulfill(response=reply, json=found)

    page.route(lambda url: "/v1/compare?" in url and "x=wall" in url, answer)
    return lambda later: ends.update(now=later) or page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


TITLE = "() => document.getElementById('plot-reward')._fullLayout?.xaxis.title.text"


def axis_drawn(page, title):
    page.wait_for_function(f"title => ({TITLE})() === title", arg=title)


def test_the_cursor_keeps_its_place_when_the_axis_changes_its_unit(visit, two_runs):
    page = visit().page
    change = scaled(page, 170)
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}&x=wall")
    axis_drawn(page, "seconds of training")
    page.focus("#cursor")
    page.keyboard.press("Home")
    for _ in range(5):
        page.keyboard.press("PageUp")
    place, rewards = page.inner_text("#cursor-at"), page.locator("#values td:nth-child(2)")
    change(200)
    axis_drawn(page, "minutes of training")
    expect(page.locator("#cursor-at")).to_have_text(place)
    expect(rewards).to_have_text([re.compile(r"^\d")] * 2)
    slider = page.locator("#cursor")
    assert int(slider.input_value()) == pytest.approx(500 * 170 / 200, abs=2)
    page.click("[data-axis=step]")
    axis_drawn(page, "step")
    for back in (False, True):
        if back:
            page.focus("#cursor")
            page.keyboard.press("Home")
            page.go_back()
            axis_drawn(page, "minutes of training")
        expect(page.locator("#cursor-at")).to_have_text("at the end of each curve")
        expect(slider).to_have_value("1000")
        expect(page.locator("line.linked-cursor[visibility=visible]")).to_have_count(0)


def test_a_curve_is_drawn_on_its_own_axis_until_that_of_another_has_come(visit, two_runs):
    page = visit().page
    held = []
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}&x=wall&smooth=0")
    page.wait_for_function(TITLE)
    title = page.evaluate(TITLE)
    assert title.endswith("of training")
    page.route("**/api/v1/compare?*", lambda route: held.append(route))
    page.click("[data-axis=step]")
    page.focus("#smoothing")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**&smooth=**")
    assert page.evaluate(TITLE) == title
    _, text = saved(page, "#csv-curves")
    assert text.decode().splitlines()[0] == f"chart,curve,runs,{title},shown,recorded,low,high"
    held[-1].continue_()
    axis_drawn(page, "step")
    page.unroute_all(behavior="ignoreErrors")


def test_a_short_run_beside_a_long_one_keeps_its_shape_and_its_values(visit, two_runs):
    page = visit().page
    page.goto("/compare")
    ends = """async () => {
      const { curves } = await import("/static/js/compare/curves.js");
      const { axisOf } = await import("/static/js/charts/axes.js");
      const { ratio } = await import("/static/js/core/format.js");
      const column = (seconds, from, to) => {
        const share = [...Array(200).keys()].map((i) => i / 199);
        const [x, y] = [share.map((s) => s * seconds), share.map((s) => from + s * (to - from))];
        return { step: share.map((_, i) => i + 1), x, y };
      };
      const key = "critic/score/mean";
      const series = { 1: { [key]: column(15, 0.4, 1.5) }, 2: { [key]: column(7200, 0.4, 1.5) } };
      const reply = { runs: [{ id: 1 }, { id: 2 }], series };
      const listed = [1, 2].map((id) => ({ key: id, ids: [id], group: null }));
      const axis = axisOf("wall", 7201);
      const { shown } = curves("reward", reply, listed, { smooth: 2 }, axis.size);
      return [...shown.map((curve) => curve.y.at(-1)), axis.write(7 / 3600), axis.write(2), ratio(0.00195), ratio(1.418)];
    }"""
    short, long, written, hours, small, usual = page.evaluate(ends)
    assert abs(short - long) < 1e-9, "the same shape in another time has the same value at its end"
    assert 1.45 < short < 1.5
    assert (written, hours, small, usual) == ("7.0 s", "2 h 0 m", "0.00195", "1.42")


def test_a_speed_up_far_below_one_keeps_its_digits(visit, two_runs):
    page = visit().page
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}")
    page.wait_for_selector("#figures tr")

    def slower(route):
        reply = route.fetch().json()
        reply["speedup"] = dict.fromkeys(reply["speedup"], 0.00195)
        route.fulfill(json=reply)

    page.route("**/api/v1/compare?*", slower)
    page.reload()
    expect(page.locator("#figures")).to_contain_text("0.00195×")
    expect(page.locator("#figures")).not_to_contain_text("0.00×")


def test_any_metric_can_be_compared(visit, two_runs):
    page = visit().page
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}&x=step")
    page.wait_for_selector("#plot-reward .main-svg >> nth=0")
    page.fill("#chart-add", "vf_lo")
    page.keyboard.press("Enter")
    page.wait_for_url("**&charts=critic/vf_loss")
    page.wait_for_selector("#more-charts .main-svg >> nth=0")
    expect(page.locator("#values-head th").last).to_have_text("critic/vf_loss")
    page.get_by_role("button", name="critic/vf_loss on a logarithmic axis").click()
    page.wait_for_function("() => document.querySelector('#more-charts .plot')._fullLayout.yaxis.type === 'log'")
    page.fill("#chart-add", "no such")
    page.keyboard.press("Enter")
    expect(page.locator("#chart-status")).to_contain_text("None of these runs")
    page.reload()
    page.wait_for_function("() => document.querySelector('#more-charts .plot')?._fullLayout?.yaxis.type === 'log'")
    page.get_by_role("button", name="Remove critic/vf_loss").click()
    expect(page.locator("#more-charts > *")).to_have_count(0)
    assert "charts=" not in page.url
