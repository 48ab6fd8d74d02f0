"""The run page lives: figures and charts follow what workers tell, through outages, and nothing that a model wrote is mark-up."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import wait_until

pytestmark = pytest.mark.browser


def step_shown(page, step):
    page.wait_for_function("s => document.querySelector('[data-part=step]').textContent === String(s)", arg=step)


def points_drawn(page, count):
    page.wait_for_function(
        "n => { const p = document.getElementById('plot-reward'); return p.data && p.data[1].x.length === n; }", arg=count
    )


def charts_linked(page):
    """Wait until the charts share cursor and zoom, which is when the last of them has been drawn."""
    page.wait_for_function("() => document.getElementById('plot-reward')._ev?.listenerCount('plotly_hover') > 0")


def test_it_follows_the_run_from_queue_to_end(visit, platform):
    run_id = platform.submit("letters live", steps=30)
    page = visit().page
    page.goto(f"/runs/{run_id}")
    page.wait_for_selector(".pill[data-state=queued]")
    supervisor, story = platform.start(run_id)
    page.wait_for_selector(".pill[data-state=running]")
    supervisor.tell(list(story.tell(3)))
    step_shown(page, 3)
    points_drawn(page, 3)
    supervisor.tell(list(story.tell(7)))
    step_shown(page, 10)
    points_drawn(page, 10)
    expect(page.locator("[data-part=idle]")).to_have_text(re.compile(r"%$"))
    expect(page.locator("[data-part=time-label]")).to_contain_text("left")
    page.reload()
    points_drawn(page, 10)
    supervisor.tell([*story.tell(20), *story.end()])
    supervisor.end("succeeded", "All steps are done.")
    page.wait_for_selector(".pill[data-state=succeeded]")
    points_drawn(page, 30)
    expect(page.locator("[data-wish=cancel]")).to_be_hidden()


def test_a_stopped_server_makes_it_stale_and_a_new_one_live_again(visit, platform):
    run_id = platform.submit("letters outage", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(2)))
    visitor = visit()
    visitor.expects("net::ERR")  # the outage itself is what the browser complains of
    page = visitor.page
    page.goto(f"/runs/{run_id}")
    points_drawn(page, 2)
    platform.web.stop()
    page.wait_for_selector(".live[data-stale] >> text=stale since")
    platform.web.start()
    supervisor.tell(list(story.tell(3)))
    step_shown(page, 5)
    points_drawn(page, 5)
    page.wait_for_selector(".live:not([data-stale])")
    expect(page.locator(".live")).to_have_text("live")


def test_a_hidden_tab_holds_no_stream_and_catches_up(visit, platform):
    run_id = platform.submit("letters hidden", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(1)))
    page = visit().page
    page.goto(f"/runs/{run_id}")
    step_shown(page, 1)
    page.wait_for_selector("#samples article")  # which are read last: nothing that was asked for is still to come
    hide = """hidden => {
        Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    requests = []
    page.evaluate(hide, True)
    page.on("request", lambda request: requests.append(request.url))
    supervisor.tell(list(story.tell(4)))
    page.wait_for_timeout(800)
    assert requests == []
    page.evaluate(hide, False)
    step_shown(page, 5)
    points_drawn(page, 5)


def test_cancel_asks_first_and_then_stops_the_run(visit, platform):
    run_id = platform.submit("letters cancelled", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(2)))
    page = visit().page
    page.goto(f"/runs/{run_id}")
    page.click("[data-wish=cancel]")
    page.click("text=Keep running")
    assert supervisor.beat() is None
    page.click("[data-wish=cancel]")
    page.click("#wish-confirm")
    page.wait_for_selector(".pill[data-state=cancelling]")
    supervisor.wait_for_signal("cancel")
    supervisor.end("cancelled")
    page.wait_for_selector(".pill[data-state=cancelled]")


def test_pause_resume_and_priority_are_offered_when_they_mean_something(visit, platform):
    run_id = platform.submit("letters paused", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(2)))
    page = visit().page
    page.goto(f"/runs/{run_id}")
    expect(page.locator("[data-wish=resume]")).to_be_hidden()
    page.click("[data-wish=pause]")
    expect(page.locator("#wish-words")).to_contain_text("saves a checkpoint")
    page.click("#wish-confirm")
    page.wait_for_selector(".pill[data-state=pausing]")
    supervisor.wait_for_signal("pause")
    supervisor.end("paused")
    page.wait_for_selector(".pill[data-state=paused]")
    page.click("[data-wish=priority]")
    page.fill("#wish-value", "70")
    page.press("#wish-value", "Enter")
    page.wait_for_selector("[data-part=priority] >> text=70")
    page.click("[data-wish=resume]")
    page.click("#wish-confirm")
    page.wait_for_selector(".pill[data-state=queued]")
    expect(page.locator("[data-wish=resume]")).to_be_hidden()


def test_a_failure_shows_its_cause_and_the_last_lines(visit, platform):
    run_id = platform.submit("letters failed", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(2)))
    page = visit().page
    page.goto(f"/runs/{run_id}")
    supervisor.end("failed", "The loss is not finite at step 3.", ["step 3", "<b>nan</b>"])
    page.wait_for_selector(".banner[data-tone=bad] >> text=The loss is not finite at step 3.")
    expect(page.locator("[data-part=log]")).to_contain_text("<b>nan</b>")


def test_model_output_is_shown_as_text(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}")
    page.wait_for_selector("#samples article")
    expect(page.locator("#samples")).to_contain_text("<script>window.pwned = 1</script>")
    expect(page.locator("#samples .v-old").first).to_contain_text("My dear friend")
    assert page.locator("#samples img, #samples script").count() == 0
    assert page.evaluate("window.pwned") is None


def test_charts_are_linked_smoothed_and_over_time(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}")
    points_drawn(page, 60)
    charts_linked(page)
    box = page.locator("#plot-reward .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#by-kl >> text=step")
    page.mouse.move(box["x"] + 60, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 260, box["y"] + 42, steps=4)
    page.mouse.up()
    zoomed = "() => document.getElementById('plot-bubble')._fullLayout.xaxis.range[1] < 50"
    page.wait_for_function(zoomed)
    page.locator("#smoothing").fill("0")
    expect(page.locator("#smoothing-value")).to_have_text("0.00")
    page.click("[data-axis=wall]")
    page.wait_for_function("() => document.getElementById('plot-reward').data[0].x[0] !== 1")
    page.wait_for_url("**?x=wall")
    first = "() => document.getElementById('plot-reward').data[0].x[0]"
    seconds = page.evaluate(first)
    page.click("[data-axis=tokens]")
    page.wait_for_function(f"was => ({first})() !== was", arg=seconds)
    page.reload()
    points_drawn(page, 60)
    expect(page.locator("[data-axis=tokens]")).to_have_attribute("aria-pressed", "true")


def test_outliers_are_left_out_of_the_height_and_counted(visit, platform):
    from oppo_contract.events import StepEvent

    run_id = platform.submit("letters spiked", steps=40)
    supervisor, story = platform.start(run_id)
    told = list(story.tell(40))
    for event in told:
        if isinstance(event, StepEvent) and event.step in (20, 21):
            event.metrics["objective/kl"] = 900.0
    supervisor.tell(told)
    page = visit().page
    page.goto(f"/runs/{run_id}")
    points_drawn(page, 40)
    height = "() => document.getElementById('plot-kl')._fullLayout?.yaxis.range[1]"
    page.wait_for_function(f"() => ({height})() > 900")
    page.check("#outliers")
    page.wait_for_function(f"() => ({height})() < 100")
    page.wait_for_selector("#plot-kl >> text=2 of 40 outside")
    assert 900 in page.evaluate("document.getElementById('plot-kl').data[0].y"), "the points stay"
    page.reload()
    points_drawn(page, 40)
    expect(page.locator("#outliers")).to_be_checked()
    page.wait_for_function(f"() => ({height})() < 100")
    page.uncheck("#outliers")
    page.wait_for_function(f"() => ({height})() > 900")
    check = """async () => {
      const { outliers } = await import("/static/js/charts/outliers.js");
      const found = (ys, more) => outliers([{ y: ys }], more), flat = Array(50).fill(2);
      const with9 = [...Array(98).keys()].map((i) => i / 98);
      return [found(flat), found([...flat, 3]).outside, found([1, 2, 900]), found([...with9, 50, -50, null, NaN]).outside,
        found([...with9, 50], { keep: [60] }), found([...with9, 50], { tozero: true }).range[0],
        outliers([{ y: with9, low: with9, high: with9.map((y, i) => (i === 7 ? 99 : y)) }]).outside];
    }"""
    assert page.evaluate(check) == [None, 1, None, 2, None, 0, 1]


def test_the_first_charts_are_seen_before_plotly_is_read_where_plotly_draws_them(visit, two_runs):
    visitor = visit()
    page, held = visitor.page, []
    page.route("**/vendor/plotly*", lambda route: held.append(route))
    page.goto(f"/runs/{two_runs[0]}")
    curve = page.locator("#plot-reward .preview path.curve").last
    curve.wait_for()
    before, figure = curve.bounding_box(), page.inner_text("#at-reward")
    assert figure, "the newest value is said as well"
    wait_until(lambda: page.wait_for_timeout(20) or held, "Plotly is not asked for", within_s=30)
    for route in held:
        route.continue_()
    page.wait_for_selector("#plot-reward .main-svg .js-line")
    page.wait_for_function("() => !document.querySelector('.preview')")
    after = page.locator("#plot-reward .main-svg .js-line").last.bounding_box()
    assert all(abs(before[side] - after[side]) <= 5 for side in ("x", "y", "width", "height")), (before, after)
    expect(page.locator("#at-reward")).to_have_text(figure)


def test_a_preview_out_of_view_fits_a_narrower_window(visit, two_runs):
    visitor = visit(viewport={"width": 400, "height": 200})
    page = visitor.page
    page.goto(f"/runs/{two_runs[1]}")
    page.wait_for_selector("#plot-kl .preview path.curve", state="attached")
    page.set_viewport_size({"width": 320, "height": 200})
    visitor.fits()
    expect(page.locator("#plot-kl .preview")).to_have_count(1)


def test_the_timeline_pans_zooms_and_explains(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/timeline")
    page.wait_for_selector("#worst li")
    page.wait_for_selector("#range >> text=steps 59–60")
    page.focus("#lanes")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#follow[aria-pressed=false]")
    page.keyboard.press("0")
    page.wait_for_selector("#range >> text=steps 49–60")
    page.click("[data-zoom=step]")
    page.wait_for_selector("[data-zoom=step][aria-pressed=true]")
    page.click("#worst li:first-child button")
    expect(page.locator("#explain")).to_contain_text("idle for")
    page.click("summary")
    expect(page.locator("#timeline-table tr")).to_have_count(24)
    box = page.locator("#mini").bounding_box()
    page.mouse.click(box["x"] + 132 + (box["width"] - 132) * 0.25, box["y"] + 20)
    page.wait_for_function("() => /steps? 1[456]/.test(document.querySelector('#range').textContent)")
    page.click("#follow")
    page.wait_for_selector("#range >> text=steps 59–60")


def test_the_whole_run_is_one_picture_and_the_window_stands_in_the_address(visit, two_runs):
    page = visit().page
    saving = {"steps": 60, "measured_s": 80.0, "sequential_s": 100.0, "saved_s": 20.0}
    page.route("**/saving", lambda route: route.fulfill(json=saving))
    page.goto(f"/runs/{two_runs[1]}/timeline?window=9.5-12")
    page.wait_for_selector("#range >> text=steps 10–12")
    page.wait_for_selector("[data-part=saved] >> text=estimated saving vs sequential 20 s (1.25×)")
    page.click("[data-zoom=run]")
    page.wait_for_selector("#range >> text=steps 1–60")
    page.wait_for_selector("#range >> text=merged")
    page.wait_for_function("() => location.search === '?window=0-60'")
    expect(page.locator("#worst li")).to_have_count(10)
    worst = page.inner_text("#worst li:first-child")
    page.focus("#worst li:first-child button")
    page.keyboard.press("Enter")
    page.wait_for_selector("#range >> text=/^step/ >> text=/^((?!merged).)*$/")
    expect(page.locator("#explain")).to_contain_text(worst.split("step ")[1].split()[0])
    with page.expect_download() as download:
        page.click("#trace[href]")
    assert download.value.suggested_filename.endswith(".trace.json")
    # The strip: by keyboard, then a new window drawn with the pointer.
    page.focus("#mini")
    page.keyboard.press("0")
    page.wait_for_selector("#range >> text=merged")
    page.keyboard.press("+")
    page.keyboard.press("+")
    page.wait_for_function("() => location.search === '?window=22.5-37.5'")
    page.keyboard.press("Home")
    page.wait_for_function("() => location.search === '?window=0-15'")
    expect(page.locator("#mini")).to_have_attribute("aria-valuetext", "steps 1–15 of 60")
    box = page.locator("#mini").bounding_box()
    at = [box["x"] + 132 + (box["width"] - 132) * part for part in (0.5, 0.75)]
    page.mouse.move(at[0], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(at[1], box["y"] + 20, steps=3)
    page.mouse.up()
    page.wait_for_selector("#range >> text=/steps 3[01]–4[56]/")


def with_specks(route):
    """The reply, with a speck of the same cause in front of every idle time: real engines tell many in a step."""
    reply = route.fetch()
    told = reply.json()
    for step in told["steps"]:
        begin = step["window_s"][0]
        step["idle"] = [[device, cause, begin, begin + 1e-6] for device, cause, *_ in step["idle"]] + step["idle"]
    route.fulfill(response=reply, json=told)


def test_a_part_of_the_whole_run_is_drawn_and_what_was_picked_stays_picked(visit, two_runs):
    page = visit().page
    page.route("**/timeline?from_step*", with_specks)
    page.goto(f"/runs/{two_runs[1]}/timeline?window=0-60")
    page.wait_for_selector("#range >> text=merged")
    picked = page.inner_text("#explain strong")
    step = int(picked.rsplit(" ", 1)[1])
    box = page.locator("#mini").bounding_box()
    from_x, to_x = (box["x"] + 132 + (box["width"] - 132) * at / 60 for at in (max(1, step - 4), min(59, step + 3)))
    page.mouse.move(from_x, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(to_x, box["y"] + 20, steps=3)
    page.mouse.up()
    page.wait_for_selector("#range >> text=/^steps ((?!merged).)*$/")
    expect(page.locator("#explain strong")).to_have_text(picked)
    expect(page.locator("#worst [aria-pressed=true]")).to_have_count(1)


def test_exported_figure_shows_the_window(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/timeline")
    page.wait_for_selector("#range >> text=steps 59–60")
    with page.expect_download() as download:
        page.click("#trace[href]")
    assert download.value.suggested_filename == f"run-{two_runs[1]}-steps-59-60.trace.json"
    page.click("#figure")
    expect(page.locator("#figure-title")).to_have_text("Steps 59–60")


def test_the_timeline_follows_the_run(visit, platform):
    run_id = platform.submit("letters timeline", steps=30)
    supervisor, story = platform.start(run_id)
    page = visit().page
    page.goto(f"/runs/{run_id}/timeline")
    page.wait_for_selector("#timeline-none h2")
    supervisor.tell(list(story.tell(1)))
    page.wait_for_selector("#range >> text=step 1 ")
    supervisor.tell(list(story.tell(4)))
    page.wait_for_selector("#range >> text=steps 4–5")
    expect(page.locator("#follow")).to_have_attribute("aria-pressed", "true")


def test_logs_come_as_they_are_written(visit, platform):
    run_id = platform.submit("letters logs", steps=30)
    supervisor, story = platform.start(run_id)
    page = visit().page
    page.goto(f"/runs/{run_id}/logs")
    page.wait_for_selector("#log >> text=loading the actor")
    expect(page.locator("#log li[data-level=warn]")).to_have_count(1)
    supervisor.tell(list(story.tell(2)))
    page.wait_for_selector("#log >> text=step 2 of 30")


def test_the_spec_is_copied_as_yaml_and_as_python(visit, two_runs):
    from oppo_contract.spec import load_spec
    from oppo_contract.yaml_text import parse_yaml
    from oppo_platform.runs.models import Run

    visitor = visit(permissions=["clipboard-read", "clipboard-write"])
    page, spec = visitor.page, load_spec(Run.objects.get(pk=two_runs[1]).spec)
    page.goto(f"/runs/{two_runs[1]}/config")
    page.focus(".actions .menu summary")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(".toast >> text=Copied")
    assert load_spec(parse_yaml(page.evaluate("navigator.clipboard.readText()"))) == spec
    page.click("main .card >> text=Copy as Python")
    wait_until(lambda: "Client()" in page.evaluate("navigator.clipboard.readText()"), "The snippet is not in the clipboard.")
    compile(page.evaluate("navigator.clipboard.readText()"), "copied", "exec")
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('refused')); }")
    page.click("main .card >> text=Copy as Python")
    assert "Client()" in page.locator("dialog.copied textarea").input_value()
    page.keyboard.press("Escape")
    expect(page.locator("dialog.copied")).to_have_count(0)
    for width in (1440, 1024, 390):
        page.set_viewport_size({"width": width, "height": 900})
        visitor.fits()
