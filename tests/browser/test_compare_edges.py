"""The compare page where data have gaps, runs changed devices, requests were refused, and what was chosen is taken back."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from oppo_platform.accounts.services import create_login_link, create_team, create_user
from tests.browser.conftest import wait_until

pytestmark = pytest.mark.browser
REWARD = "critic/score/mean"


def of(*runs):
    """The address of a comparison."""
    return f"/compare?runs={','.join(map(str, runs))}&x=step"


def test_a_first_step_is_a_dot(visit, platform):
    run_id = platform.submit("letters compared at once", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(1)))
    page = visit().page
    page.goto(of(run_id))
    dot = page.locator("#plot-reward .points path").first
    expect(dot).to_be_attached()
    assert dot.bounding_box()["width"] > 4
    supervisor.end("failed", "It was stopped.")


def test_a_target_leaves_the_spikes_of_merged_steps_in_the_window(visit, two_runs):
    page = visit().page

    def merged(route):
        reply = route.fetch().json()
        column = reply["series"][str(two_runs[0])][REWARD]
        column |= {"low": [y - 1 for y in column["y"]], "high": [y + 1 for y in column["y"]]}
        column["high"][3] = 50
        route.fulfill(json=reply)

    page.route("**/api/v1/compare?*", merged)
    page.goto(of(*two_runs) + "&target=1")
    page.wait_for_function("() => document.getElementById('plot-reward')._fullLayout?.yaxis.range[1] > 50")


BUBBLE = """async () => {
  const { curves } = await import("/static/js/compare/curves.js");
  const column = (from, to, y) => {
    const step = Array.from({ length: to - from + 1 }, (_, i) => from + i);
    return { step, x: step, y: step.map(() => y) };
  };
  const [first, second, third] = [column(1, 10, 0.5), column(11, 20, 0.1), column(11, 20, 0.3)];
  Object.values(third).forEach((list) => list.splice(5, 1)); // merged at other steps
  const series = { "bubble/cpu:0": first, "bubble/cuda:0": second, "bubble/cuda:1": third };
  const reply = { runs: [{ id: 1 }], series: { 1: series } };
  const { shown } = curves("bubble", reply, [{ key: 1, ids: [1], group: null }], { smooth: 0 }, 1);
  return shown[0].y.map((y) => Math.round(y));
}"""


def test_the_idle_share_of_a_run_goes_on_when_its_devices_change(visit):
    page = visit().page
    page.goto("/compare")
    assert page.evaluate(BUBBLE) == [50] * 10 + [20] * 10


def test_a_run_is_outlined_also_without_a_value_above_0_and_beside_a_chart_that_is_not_there_yet(visit, two_runs):
    page, held = visit().page, []
    page.goto(of(*two_runs) + "&charts=oppo/overcommit&log=oppo/overcommit")
    page.wait_for_function("() => document.querySelector('#more-charts .plot')?._fullLayout?.yaxis.type === 'log'")
    row = page.locator(f"#figures tr[data-key='{two_runs[0]}']")  # sequential: Δ is 0
    row.hover()
    expect(page.locator("svg.outlined")).to_have_count(4)
    expect(row).to_have_attribute("data-pointed", "")
    page.mouse.move(0, 0)
    expect(page.locator("svg.outlined")).to_have_count(0)
    page.route("**/api/v1/compare?*", lambda route: held.append(route))
    page.fill("#chart-add", "actor/entropy")
    page.keyboard.press("Enter")
    wait_until(lambda: page.wait_for_timeout(20) or held, "the metric is not requested", 30)
    row.hover()
    expect(page.locator("svg.outlined")).to_have_count(4)
    while held:
        held.pop().continue_()
    page.unroute("**/api/v1/compare?*")


RANGES = """() => ["xaxis", "yaxis"].map((axis) =>
  document.getElementById("plot-reward")._fullLayout[axis].range.map((x) => x.toFixed(6)))"""


def test_back_takes_back_a_zoom_of_both_axes(visit, two_runs):
    page = visit().page
    page.goto(of(*two_runs))
    page.wait_for_selector("#plot-reward .nsewdrag")
    whole = page.evaluate(RANGES)
    box = page.locator("#plot-reward .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 260, box["y"] + 100, steps=4)
    page.mouse.up()
    page.wait_for_url("**zoom=**")
    page.wait_for_function(f"(whole) => ({RANGES})().every((range, i) => String(range) !== String(whole[i]))", arg=whole)
    page.go_back()
    page.wait_for_function(f"(whole) => String(({RANGES})()) === String(whole)", arg=whole)


def test_what_was_refused_can_be_taken_back(visit, two_runs):
    visitor = visit()
    visitor.expects("Failed to load resource")
    page = visitor.page
    page.goto(of(999_999))
    expect(page.locator("#refused")).to_contain_text("does not exist")
    page.locator("#tokens button").first.click()
    expect(page.locator("#nothing")).to_be_visible()
    expect(page.locator("#refused")).to_be_hidden()
    page.goto(of(*two_runs) + "&group=fork.step")
    expect(page.locator("#refused")).to_be_visible()
    expect(page.locator("#group")).to_have_value("fork.step")
    page.select_option("#group", "")
    page.wait_for_selector("#plot-reward .nsewdrag")
    expect(page.locator("#refused")).to_be_hidden()


def test_the_comparison_stays_when_a_team_is_chosen(visit, platform):
    user = create_user("tessa", "tessa@example.org").user
    first, _ = create_team("First of two", user), create_team("Second of two", user)
    visitor = visit(logged_in=False)
    visitor.expects("Failed to load resource")  # the runs are another team's
    page = visitor.page
    page.goto(urlsplit(create_login_link(user)).path)
    page.goto(of(1, 2))
    page.click("[data-axis=tokens]")
    page.wait_for_url("**x=tokens**")
    page.select_option("#team-switch", str(first.pk))
    page.wait_for_function("(id) => document.querySelector('#team-switch option[selected]')?.value === id", arg=str(first.pk))
    assert page.url.endswith(of(1, 2).replace("x=step", "x=tokens"))


def test_the_slider_and_the_target_say_what_they_are_now(visit, two_runs):
    page = visit().page
    page.goto(of(*two_runs))
    page.wait_for_selector("#plot-reward .nsewdrag")
    cursor = page.locator("#cursor")
    expect(cursor).to_have_attribute("aria-valuetext", "at the end of each curve")
    cursor.press("ArrowLeft")
    expect(cursor).not_to_have_attribute("aria-valuetext", "at the end of each curve")
    box = page.locator("#plot-reward .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 20)
    page.mouse.move(5, 5)
    expect(cursor).to_have_attribute("aria-valuetext", "at the end of each curve")
    page.fill("#target", "abc")
    page.keyboard.press("Tab")
    expect(page.locator("#target")).to_have_attribute("aria-invalid", "true")
    page.click("#outliers")
    expect(page.locator("#target")).not_to_have_attribute("aria-invalid", "true")
