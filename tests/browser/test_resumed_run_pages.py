"""A run that is taken up again trains some steps once more: open pages show those, not what an earlier attempt told of them."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from oppo_contract.events import EVENT_ADAPTER
from tests.browser.test_run_page import points_drawn
from tests.browser.test_samples import steps_shown

pytestmark = pytest.mark.browser
HELD_AND_STORED = """async () => {
  const key = 'critic/score/mean', held = document.getElementById('plot-reward').data[0];
  const api = await import("/static/js/core/api.js");
  const { run } = await import("/static/js/run/store.js");
  const { series } = await api.get(`runs/${run.id}/metrics`, { keys: key });
  return [held.x, held.y, series[key].step, series[key].y];
}"""
DECISIONS = """async () => {
  const api = await import("/static/js/core/api.js");
  const { run } = await import("/static/js/run/store.js");
  const { view } = await import("/static/js/run/training-view.js");
  return [view.decisions, await api.all(`runs/${run.id}/decisions`)];
}"""
OF_THREE_STEPS = """async () => {
  const { timelineModel } = await import("/static/js/run/timeline-model.js");
  const step = (n, device) => ({ step: n, window_s: [n, n + 1], device: [device], role: ['actor'], phase: ['decode'],
    start_s: [n], end_s: [n + 0.5], chunk: [0], rows: [1], idle: [[device, 'tail', n + 0.5, n + 1]], deferred: [] });
  const steps = [step(1, 'cpu:0'), step(2, 'cpu:0'), step(3, 'cuda:0')];
  const model = timelineModel({ devices: ['cuda:0', 'cuda:1'], lanes: [['cuda:0', 'actor']], steps, worst: [] });
  return [model.busy, model.measured];
}"""
BUSY = """async () => {
  const { CHARTS } = await import("/static/js/run/training-charts.js");
  const { run } = await import("/static/js/run/store.js");
  const { view } = await import("/static/js/run/training-view.js");
  return CHARTS.busy({ ...view, summary: run.summary }).column.x.at(-1);
}"""


@pytest.fixture
def trained(platform):
    """A run of which an attempt has told 20 steps, and how a second one takes it up after step 10, on GPUs."""
    run_id = platform.submit("letters again", steps=40)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(20)))

    def take_up():
        from oppo_platform.runs.lifecycle import pause_run, resume_run

        pause_run(run_id, "user:test")
        supervisor.wait_for_signal("pause")
        supervisor.end("paused")
        resume_run(run_id, "user:test")
        second, again = platform.start(run_id)
        again.step = 10
        again.rng.seed(2)

        def tell(count):
            second.tell(
                [
                    EVENT_ADAPTER.validate_json(EVENT_ADAPTER.dump_json(event).replace(b"cpu:", b"cuda:"))
                    for event in again.tell(count)
                ]
            )

        return tell

    return run_id, take_up


@pytest.mark.full
def test_figures_and_spans_of_steps_that_are_trained_again_replace_the_old_ones(visit, trained):
    run_id, take_up = trained
    visitor = visit()
    page, timeline = visitor.page, visitor.context.new_page()
    page.goto(f"/runs/{run_id}")
    points_drawn(page, 20)
    timeline.goto(f"/runs/{run_id}/timeline")
    timeline.wait_for_selector("#range >> text=steps 19–20")
    page.bring_to_front()  # timers of a page behind another one are slow
    tell = take_up()
    tell(4)
    points_drawn(page, 14)
    steps, rewards, *stored = page.evaluate(HELD_AND_STORED)
    assert [steps, rewards] == stored
    assert page.evaluate(BUSY) == 14, "the axis holds the device that trains now"
    timeline.wait_for_selector("#range >> text=steps 13–14")
    tell(1)
    points_drawn(page, 15)
    held, stored = page.evaluate(DECISIONS)
    assert held
    assert held == stored
    timeline.wait_for_selector("#range >> text=steps 14–15")
    assert timeline.evaluate(OF_THREE_STEPS) == [[0.5, None], [1, 0]], "a device counts in the steps that tell of it"


@pytest.mark.full
def test_a_reader_stays_where_the_newer_attempt_has_been_and_is_offered_its_answers(visit, trained):
    run_id, take_up = trained
    visitor = visit()
    page, samples, far = visitor.page, visitor.context.new_page(), visitor.context.new_page()
    page.goto(f"/runs/{run_id}/timeline?window=9-12")
    page.wait_for_selector("#range >> text=steps 10–12")
    samples.goto(f"/runs/{run_id}/samples")
    steps_shown(samples, *range(20, 0, -1))
    far.goto(f"/runs/{run_id}/timeline?window=16-19")
    far.wait_for_selector("#range >> text=steps 17–19")
    before = page.text_content("#timeline-table")
    take_up()(4)
    page.wait_for_function("before => document.getElementById('timeline-table').textContent !== before", arg=before)
    expect(page.locator("#range")).to_contain_text("steps 10–12")
    far.wait_for_selector("#range >> text=steps 12–14")
    samples.click("#fresh >> text=The run was resumed")
    steps_shown(samples, *range(14, 0, -1))
    expect(samples.locator("#fresh")).to_be_hidden()


def test_two_tabs_retry_a_failed_run_once(visit, platform):
    from oppo_platform.runs.models import Run

    run_id = platform.submit("letters retried", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(2)))
    visitors = [visit(), visit(viewport={"width": 390, "height": 860})]
    pages = [visitor.page for visitor in visitors]
    for page in pages:
        page.goto(f"/runs/{run_id}")
        expect(page.locator("#retry")).to_be_hidden()
    supervisor.end("failed", "The reward service does not respond.")
    for visitor in visitors:
        expect(visitor.page.locator("#retry-effect")).to_contain_text("queues this run again. It restarts from step 0; earlier")
        visitor.fits()
    pages[0].focus("#retry")
    pages[0].keyboard.press("Enter")
    for page in pages:
        page.wait_for_selector(".pill[data-state=queued]")
        expect(page.locator("#retry")).to_be_hidden()
        expect(page.locator("[data-part=reason]")).to_contain_text("Retried by mira. Restarts from step 0.")
    visitors[1].expects("409")
    retry = 'const api = await import("/static/js/core/api.js"); return api.post(path).catch((e) => e.message);'
    refused = pages[1].evaluate(f"async (path) => {{ {retry} }}", f"runs/{run_id}/retry")
    assert "Only failed runs can be retried" in refused
    assert Run.objects.get(pk=run_id).transitions.filter(old="failed").count() == 1
