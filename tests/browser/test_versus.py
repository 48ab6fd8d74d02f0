"""The compare page with more runs than one can tell apart. After the other files: they count the runs of the list."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def names(page):
    """The curves of the reward chart that the legend names."""
    return page.evaluate("document.getElementById('plot-reward').data.filter(t => t.showlegend).map(t => t.name)")


def test_many_runs_are_faint_but_one_and_every_choice_is_in_the_address(visit, nine_runs):
    page = visit().page
    page.goto(f"/compare?runs={','.join(map(str, nine_runs))}&x=step")
    page.wait_for_selector("#plot-reward .main-svg")
    assert names(page) == []
    page.hover(f"#figures tr[data-key='{nine_runs[3]}']")
    assert page.locator("svg.outlined").count() == 3, "the run under the pointer, in every chart"
    page.locator("[aria-label='Highlight seed 2 True']").focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**&highlight={nine_runs[3]}")
    assert names(page) == ["seed 2 True"]
    assert page.locator("#counted").is_visible()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Highlight seed 2 True"
    assert page.locator("#parallel path[data-key]").count() == 9
    page.select_option("#group", "overlap.intra_step")
    page.wait_for_selector("#groups tr >> nth=1")
    assert names(page) == ["off · 4", "per_chunk · 5"]
    assert "3 of 4 reached it" in page.inner_text("#groups tr >> nth=0")
    page.fill("#target", "0.2")
    page.press("#target", "Enter")
    page.wait_for_selector("#groups >> text=all 5")
    assert "×" in page.locator("#groups tr").nth(1).locator("td").nth(5).inner_text()
    page.select_option("#baseline", label="per_chunk")
    page.wait_for_url(f"**&baseline={nine_runs[1]}**")
    page.wait_for_selector("#groups tr[data-pinned] >> text=per_chunk")
    address, view = page.url, page.inner_text("#groups")
    page.go_back()
    page.wait_for_selector("#groups tr[data-pinned] >> text=off")
    page.goto(address)
    page.wait_for_selector("#groups tr[data-pinned] >> text=per_chunk")
    assert page.inner_text("#groups") == view, "the address shows the same view"
    assert page.locator(".pick[aria-pressed=true]").count() == 1


def test_zoom_outliers_and_what_counts_are_in_the_address(visit, two_runs):
    page = visit().page
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}&x=step&target=0.5")
    page.wait_for_selector("#plot-reward .main-svg")
    right = "() => document.getElementById('plot-{}')._fullLayout.xaxis.range[1]"
    box = page.locator("#plot-reward .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 260, box["y"] + 42, steps=4)
    page.mouse.up()
    page.wait_for_url("**&zoom=*")
    page.wait_for_function(f"() => ({right.format('bubble')})() < 50")
    wanted = [page.evaluate(right.format(name)) for name in ("reward", "bubble")]
    page.reload()
    page.wait_for_selector("#plot-bubble .main-svg >> nth=0")
    page.wait_for_function(f"was => Math.abs(({right.format('bubble')})() - was) < 0.01", arg=wanted[0])
    assert wanted[0] == pytest.approx(wanted[1])
    page.locator("#plot-kl .nsewdrag").dblclick()
    page.wait_for_function(f"() => ({right.format('reward')})() > 59")
    assert "zoom" not in page.url
    page.go_back()
    page.wait_for_function(f"was => Math.abs(({right.format('reward')})() - was) < 0.01", arg=wanted[0])
    page.go_forward()
    page.check("#outliers")
    page.check("#counted")
    page.wait_for_url("**&outliers=ignore&counted=1")
    assert page.is_disabled("#smoothing")
    page.wait_for_function("() => Oppo.compareView.read(location.search).counted")
    crossing = """() => {
      const curves = document.getElementById('plot-reward').data.filter((t) => t.meta);
      const told = [...document.querySelectorAll('#figures tr td:nth-child(3)')].map((td) => Number(td.textContent));
      return curves.map((t) => t.x[t.y.findIndex((y) => y >= 0.5)]).join() === told.join();
    }"""
    page.wait_for_function(crossing)
    page.goto(f"/compare?runs={two_runs[0]},{two_runs[1]}&zoom=9,3&outliers=x&counted=2")
    page.wait_for_selector("#plot-reward .main-svg")
    assert "zoom" not in page.url
    fork = """() => {
      const curve = { x: [5, 6], y: [1, 2], raw: [1, 2] };
      const entry = { key: 1, label: "a", ids: [1], colour: 1, dash: 0, group: null };
      const view = { picked: null, smooth: 0, axis: "step", zoom: null, outliers: false };
      const reply = { runs: [{ id: 1, forked_from: { run: 2, step: 4 } }], groups: [], target: null };
      const v = { view, reply, colours: new Map([[1, 1]]), axis: Oppo.axisOf("step", 9), many: false, resets: 0 };
      const made = Oppo.compareCharts.build("reward", { shown: [{ entry, ...curve }], runs: new Map([[1, curve]]) }, v);
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
    assert page.locator("line.linked-cursor[visibility=visible]").count() == 3
    assert page.get_attribute("#cursor", "aria-valuetext") == "at step 36"
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
    check = """() => {
      const C = Oppo.compareCurves, x = [...Array(1000).keys()], y = x.map((i) => Math.sin(i / 90));
      const half = (list) => list.filter((_, i) => i % 2);
      const fine = half(C.smooth(x, y, 20)), coarse = C.smooth(half(x), half(y), 20);
      const mean = C.averaged([{ x: [0, 4], y: [0, 4] }, { x: [2, 6], y: [4, 8] }, { x: [0, 6], y: [2, 2] }], "range");
      const off = Math.max(...fine.map((v, i) => Math.abs(v - coarse[i])));
      return { off, mean, formula: Oppo.compareExport.csv([["=1+1", "a,b", null, -2]]) };
    }"""
    told = page.evaluate(check)
    assert told["off"] < 0.03, "half of the points, the same curve"
    assert told["mean"] == {
        "x": [0, 2, 4, 6],
        "y": [1, 8 / 3, 4, 5],
        "low": [0, 2, 2, 2],
        "high": [2, 4, 6, 8],
        "n": [2, 3, 3, 2],
    }
    assert told["formula"] == '\'=1+1,"a,b",,-2\r\n'
