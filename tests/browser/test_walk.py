"""Every page and tab follows a run, tells of an outage, and comes back by itself."""

from __future__ import annotations

import pytest
from playwright.sync_api import TimeoutError, expect

pytestmark = pytest.mark.browser

STEP = "[...document.querySelectorAll('[data-part=step]')].every(e => e.textContent === String(n))"
# Page, what says on it that step `n` has come (as a condition in the page), and where the run is `id`.
FOLLOWING = {
    "/runs/{id}": f"{STEP} && document.getElementById('plot-reward').data?.[1].x.length === n",
    "/runs/{id}/timeline": f"{STEP} && new RegExp(`steps?.*\\\\b${{n}} ·`).test(document.getElementById('range').textContent)",
    "/runs/{id}/utilization": f"{STEP} && document.getElementById('plot-overlap').data?.[0].x.length === n",
    "/runs/{id}/samples": f"{STEP} && (n < 3 || !document.getElementById('fresh').hidden)",
    "/runs/{id}/logs": f"{STEP} && document.getElementById('log').textContent.includes(`step ${{n}} of`)",
    "/runs/{id}/config": STEP,
    "/runs/{id}/checkpoints": STEP,
    "/runs/{id}/events": f"{STEP} && document.querySelector('#events tr') !== null",
    "/runs": "document.querySelector(`#rows tr[data-key='${id}'] .progress-cell`)?.textContent.trim().startsWith(`${n} /`)",
    "/queue": "[...document.querySelectorAll('.progress-cell')].some(e => e.textContent.trim().startsWith(`${n} /`))",
    "/compare?runs={id},{other}&x=step": "(document.getElementById('plot-reward').data ?? [])"
    ".some(t => t.meta === id && t.x.at(-1) === n)",
}


@pytest.mark.full
def test_every_page_follows_the_run_and_comes_back_after_an_outage(visit, platform, two_runs):
    run_id = platform.submit("letters walked", steps=30)
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(2)))
    first = visit()
    state = first.context.storage_state()  # each page in a context of its own: a browser opens six connections in one
    visitors = {path: visit(logged_in=False, storage_state=state) for path in FOLLOWING}

    for visitor in [first, *visitors.values()]:
        # The browser reports the outage; uvicorn answers requests with 500 that its end interrupts.
        visitor.expects("net::ERR", "status of 500")

    def all_show(step):
        for path, visitor in visitors.items():
            shown = f"([id, n]) => Boolean({FOLLOWING[path]})"
            try:
                visitor.page.wait_for_function(shown, arg=[run_id, step])
            except TimeoutError as late:
                raise AssertionError(f"{path} does not show step {step}") from late

    for path, visitor in visitors.items():
        visitor.page.goto(path.format(id=run_id, other=two_runs[0]))
    all_show(2)
    supervisor.tell(list(story.tell(2)))
    all_show(4)
    platform.web.stop()
    for visitor in visitors.values():
        visitor.page.wait_for_selector(".live[data-stale] >> text=stale since")
    platform.web.start()
    supervisor.tell(list(story.tell(3)))
    all_show(7)
    for visitor in visitors.values():
        visitor.page.wait_for_selector(".live:not([data-stale])")
        expect(visitor.page.locator(".live")).to_have_text("live")
