"""Whatever answer comes late, a page shows what was asked for last, and what a reader does meanwhile counts."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest
from playwright.sync_api import expect

from oppo_platform.runs.models import Run
from tests.browser.conftest import wait_until
from tests.browser.test_logs import shown, write
from tests.browser.test_run_page import points_drawn, step_shown
from tests.browser.test_samples import steps_shown

pytestmark = pytest.mark.browser


def test_a_verdict_about_an_earlier_value_does_not_take_the_newer_one_back(visit, hold, platform):
    page = visit().page
    page.goto("/runs/new")
    page.wait_for_selector("#send[aria-disabled=false]")
    held = hold(page, "**/runs/validate")
    page.fill("[data-path=steps]", "2")
    held.come()
    page.fill("[data-path=steps]", "25")
    held.answer(0)
    expect(page.locator("[data-path=steps]")).to_have_value("25")
    expect(page.locator("#send")).to_have_attribute("aria-disabled", "true")
    held.come(2)
    held.answer(1)
    expect(page.locator("#send")).to_have_attribute("aria-disabled", "false")
    expect(page.locator("#yaml")).to_have_value(re.compile(r"^steps: 25$", re.MULTILINE))


@pytest.mark.full
def test_keys_on_the_strip_go_on_from_where_the_last_one_led(visit, hold, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/timeline?window=0-60")
    page.wait_for_selector("#range >> text=merged")
    held = hold(page, "**/timeline?*")
    page.focus("#mini")
    page.keyboard.press("+")
    held.come()
    page.keyboard.press("+")
    held.come(2)
    held.open()
    page.wait_for_function("() => location.search === '?window=22.5-37.5'")


def test_new_steps_do_not_lead_a_reader_back_who_has_moved_on(visit, hold, platform):
    run_id = platform.submit("letters watched", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(8)))
    page = visit().page
    page.goto(f"/runs/{run_id}/timeline")
    page.wait_for_selector("#range >> text=steps 7–8")
    held = hold(page, "**/timeline?*")
    supervisor.tell(list(story.tell(3)))
    held.come()
    page.focus("#lanes")
    for _ in range(8):
        page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#range >> text=/^steps? [1-6](–[1-7])? ·/")
    held.answer(0)
    expect(page.locator("#range")).to_have_text(re.compile(r"^steps? [1-6](–[1-7])? ·"))
    expect(page.locator("#follow")).to_have_attribute("aria-pressed", "false")
    held.open()


@pytest.mark.full
def test_an_axis_chosen_while_the_figures_are_read_is_the_one_drawn(visit, hold, two_runs):
    page = visit().page
    held = hold(page, "**/metrics?*")
    page.goto(f"/runs/{two_runs[1]}")
    held.come()
    page.wait_for_function("() => window.Plotly")
    chosen = "() => location.search === '?x=wall'"
    wait_until(lambda: page.click("[data-axis=wall]") or page.evaluate(chosen), "the axis cannot be chosen", 30)
    held.open()
    points_drawn(page, 60)
    page.wait_for_function("() => document.getElementById('plot-reward').data[0].x[0] !== 1")


@pytest.mark.full
def test_a_late_reply_to_one_wish_leaves_the_next_question_open(visit, hold, platform):
    run_id = platform.submit("letters hurried", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(1)))
    page = visit().page
    page.goto(f"/runs/{run_id}")
    held = hold(page, "**/pause")
    page.click("[data-wish=pause]")
    page.click("#wish-confirm")
    held.come()
    reply = held.routes[0].fetch()
    page.wait_for_selector(".pill[data-state=pausing]")
    page.click("[data-wish=cancel]")
    held.answer(0, reply)
    expect(page.locator("#wish-dialog")).to_be_visible()
    expect(page.locator("#wish-title")).to_contain_text("Cancel")
    page.click("text=Keep running")


def test_a_remedy_does_not_take_back_yaml_that_is_being_checked(visit, hold, platform):
    page = visit().page
    page.goto("/runs/new")
    page.wait_for_selector("#send[aria-disabled=false]")
    page.click("[data-view=yaml]")
    text = re.sub(r"micro_batch_tokens: \d+", "micro_batch_tokens: 65536", page.input_value("#yaml"))
    text = re.sub(r"batch_size: \d+", "batch_size: 64", text)
    page.fill("#yaml", text)
    use = page.locator(".plan-remedy").get_by_role("button", name="Use this")
    expect(use).to_be_visible()
    held = hold(page, "**/runs/validate")
    newer = re.sub(r"^steps: \d+$", "steps: 7", text, flags=re.MULTILINE)
    page.fill("#yaml", newer)
    use.click()
    held.come()
    held.answer(0)
    expect(page.locator("#yaml")).to_have_value(newer)
    held.open()
    use.click()
    expect(use).to_have_count(0)
    expect(page.locator("#yaml")).to_have_value(re.compile(r"^steps: 7$", re.MULTILINE))


def test_the_form_does_not_take_back_yaml_that_is_being_checked(visit, hold, platform):
    """What is typed in the form meanwhile is added to what the YAML says."""
    page = visit().page
    page.goto("/runs/new")
    page.wait_for_selector("#send[aria-disabled=false]")
    page.click("[data-view=yaml]")
    held = hold(page, "**/runs/validate")
    page.fill("#yaml", re.sub(r"^steps: \d+$", "steps: 7", page.input_value("#yaml"), flags=re.MULTILINE))
    page.click("[data-view=form]")
    expect(page.locator("[name=preset]").first).to_be_disabled()
    page.fill("[data-path='ppo.batch_size']", "24")
    held.come()
    held.open()
    expect(page.locator("[data-path='ppo.batch_size']")).to_have_value("24")
    expect(page.locator("[data-path=steps]")).to_have_value("7")
    page.wait_for_selector("#send[aria-disabled=false]")
    expect(page.locator("[name=preset]").first).to_be_enabled()
    expect(page.locator("#yaml")).to_have_value(re.compile(r"^steps: 7$", re.MULTILINE))
    expect(page.locator("#yaml")).to_have_value(re.compile(r"batch_size: 24$", re.MULTILINE))


def test_what_is_changed_after_a_submission_failed_is_submitted(visit, platform):
    """The server had read the YAML, so that the form goes on from it."""
    visitor = visit()
    visitor.expects("Failed to load resource")
    page = visitor.page
    page.goto("/runs/new")
    page.wait_for_selector("#send[aria-disabled=false]")
    page.click("[data-view=yaml]")
    page.fill("#yaml", re.sub(r"^steps: \d+$", "steps: 7", page.input_value("#yaml"), flags=re.MULTILINE))
    expect(page.locator("[data-path=steps]")).to_have_value("7")
    page.route("**/api/v1/runs", lambda route: route.fulfill(status=503, json={"detail": "In a moment."}), times=1)
    page.click("#send")
    expect(page.locator("#why-not")).to_contain_text("In a moment.")
    page.click("[data-view=form]")
    page.fill("[data-path=steps]", "9")
    page.wait_for_selector("#send[aria-disabled=false]")
    expect(page.locator("#yaml")).to_have_value(re.compile(r"^steps: 9$", re.MULTILINE))
    page.click("#send")
    page.wait_for_url(re.compile(r"/runs/\d+$"))
    assert Run.objects.order_by("-id").first().spec["steps"] == 9


def test_device_hours_of_a_running_state_do_not_replace_those_of_its_end(visit, hold, platform):
    run_id = platform.submit("letters counted", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(1)))
    page = visit().page
    held = hold(page, "**/usage")
    page.goto(f"/runs/{run_id}")
    held.come()
    reply = held.routes[0].fetch()
    supervisor.end("failed", "It was stopped.")
    held.come(2)
    for number, hours in ((1, 7), (0, 5)):
        route = held.routes[number]
        with page.expect_event("requestfinished", lambda request, route=route: request == route.request):
            route.fulfill(response=reply, json={**reply.json(), "device_hours": hours, "devices": 0})
        page.evaluate("() => new Promise((done) => setTimeout(() => requestAnimationFrame(done)))")
        expect(page.locator("#run [data-part=cost]")).to_have_text(" · 7.00 device-hours")
    held.waiting.clear()


def test_runs_that_are_being_tagged_are_not_cancelled_by_the_next_question(visit, hold, platform):
    runs = [platform.submit(f"letters tagged {n}", steps=3) for n in range(3)]
    page = visit().page
    page.goto("/runs?view=all&q=name:tagged")
    for run_id in runs:
        page.check(f"#rows input[value='{run_id}']")
    held = hold(page, re.compile(r"/runs/\d+/(tags|cancel)$"))
    page.click("[data-bulk=tag]")
    page.keyboard.type("slow")
    page.keyboard.press("Enter")
    held.come()
    page.keyboard.press("Enter")  # sent once
    page.keyboard.press("Escape")
    page.click("[data-bulk=cancel]")
    for number in range(3):
        held.come(number + 1)
        held.answer(number)
    page.wait_for_selector(".toast >> text=Tags of 3 runs changed")
    asked = [(route.request.url.rsplit("/", 2)[1:], route.request.post_data_json) for route in held.routes]
    assert [path for path, _ in asked] == [[str(run_id), "tags"] for run_id in sorted(runs, reverse=True)]
    assert all(body == {"add": ["slow"], "remove": []} for _, body in asked)
    expect(page.locator("#bulk-dialog")).to_be_visible()
    expect(page.locator("#bulk-title")).to_have_text("Cancel 3 runs?")
    expect(page.locator("#bulk-confirm")).to_be_enabled()


def test_steps_that_come_while_answers_are_read_are_offered(visit, hold, platform):
    run_id = platform.submit("letters read", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(1)))
    page = visit().page
    page.goto(f"/runs/{run_id}/samples")
    steps_shown(page, 1)
    held = hold(page, "**/samples?*")
    page.fill("[name=to_step]", "9")
    held.come()
    reply = held.routes[0].fetch()
    supervisor.tell(list(story.tell(2)))
    step_shown(page, 3)
    held.answer(0, reply)
    expect(page.locator("#fresh")).to_have_text("2 newer steps: reload")
    held.open()


@pytest.mark.full
def test_earlier_lines_come_although_new_ones_were_being_asked_for(visit, hold, platform):
    run_id = platform.submit("letters scrolled", steps=30)
    supervisor, story = platform.start(run_id)
    write(supervisor, story, 1, 1300)
    page = visit().page
    page.goto(f"/runs/{run_id}/logs")
    shown(page, 1000)
    held = hold(page, "**/logs?after=*")
    held.come()
    page.evaluate("document.getElementById('log').scrollTop = 0")
    page.wait_for_function("() => !document.getElementById('follow-log').checked")
    held.answer(0)
    shown(page, 1301)
    held.open()


@pytest.mark.parametrize(
    ("path", "wanted", "shown"),
    [
        ("/runs/{1}/samples", "**/samples?*", "#found"),
        ("/runs/{1}/samples/side-by-side?held_out=false", "**/compare/samples?*", "#prompts article"),
        ("/compare?runs={0},{1}", "**/api/v1/compare?*", "#result"),
        ("/runs/{1}/events", "**/events?*", "#found"),
        ("/compare/samples?runs={0},{1}&held_out=false", "**/compare/samples?*", "#prompts article"),
    ],
)
def test_a_page_that_waits_for_data_does_not_look_empty(visit, hold, two_runs, path, wanted, shown):
    page = visit().page
    held = hold(page, lambda url: "/api/" in url and fnmatch(url, wanted))
    page.goto(path.format(*two_runs))
    held.come()
    expect(page.locator("#loading .skeleton").first).to_be_visible()
    expect(page.locator("#nothing")).to_be_hidden()
    expect(page.locator(shown)).not_to_be_visible()
    held.open()
    expect(page.locator(shown).first).to_be_visible()
    expect(page.locator("#loading")).to_be_hidden()


def test_a_comparison_of_no_runs_stays_empty(visit, hold, two_runs):
    page = visit().page
    held = hold(page, "**/api/v1/compare?*")
    page.goto(f"/compare?runs={two_runs[0]}")
    held.come()
    page.click("#tokens button")
    held.answer(0)
    expect(page.locator("#result")).to_be_hidden()


@pytest.mark.full
def test_a_comparison_that_the_server_fails_to_make_once_is_asked_for_again(visit, platform):
    run_id = platform.submit("letters compared", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(2)))
    visitor = visit()
    visitor.expects("503")  # the failure itself
    page = visitor.page
    page.clock.install()
    page.goto(f"/compare?runs={run_id}")
    expect(page.locator("#live")).to_have_text("live")
    page.route("**/api/v1/compare?*", lambda route: route.fulfill(status=503, json={"title": "Busy"}), times=1)
    page.clock.fast_forward(4000)
    expect(page.locator("#live")).to_contain_text("stale since")
    expect(page.locator("#refused")).to_be_hidden()
    page.clock.fast_forward(4000)
    expect(page.locator("#live")).to_have_text("live")


@pytest.mark.full
def test_a_step_is_drawn_although_its_decisions_could_not_be_read_at_first(visit, platform):
    run_id = platform.submit("letters patient", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(2)))
    visitor = visit()
    visitor.expects("net::ERR")  # of the request that is cut off on purpose
    page = visitor.page
    page.goto(f"/runs/{run_id}")
    page.wait_for_selector("#samples article")
    page.route("**/decisions?*", lambda route: route.abort(), times=1)
    supervisor.tell(list(story.tell(1)))
    points_drawn(page, 3)
