"""The Utilization tab: figures of the last steps as they are stored, idle time by cause, what is not measured said plainly."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.browser


def test_idle_time_is_told_by_device_and_cause(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/utilization")
    page.wait_for_selector("#plot-causes .main-svg >> nth=0")
    page.wait_for_function("() => document.getElementById('plot-overlap').data[0].x.length === 60")
    bubble = page.evaluate(
        """async id => {
            const { series } = await Oppo.api.get(`runs/${id}/metrics`, { keys: 'bubble/*', since_step: 10 });
            const all = Object.values(series).flatMap(c => c.y);
            return 100 * all.reduce((a, b) => a + b, 0) / all.length;
        }""",
        two_runs[1],
    )
    assert page.inner_text("#at-causes") == f"{bubble:.1f} %"
    shares = [float(cell.split()[0]) for cell in page.locator("#causes td:nth-child(2)").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert abs(sum(shares) - bubble) < 0.5
    cards = page.locator("#devices .card")
    assert cards.all_inner_texts()[1].startswith("cpu:1")
    assert "reward, reference, critic" in cards.nth(1).inner_text()
    assert "waits mostly for: decode" in cards.nth(1).inner_text()
    assert "Most is lost to decode" in page.inner_text("#advice")
    assert "Not recorded by this run: memory" in page.inner_text("#unmeasured")
    assert page.locator("#memory-card").is_hidden()
    first = "() => document.getElementById('plot-overlap').data[0].x[0]"
    assert page.evaluate(first) == 1
    seen = {1}
    for axis in ("wall", "tokens", "gpu_seconds"):
        page.click(f"[data-axis={axis}]")
        page.wait_for_function(f"seen => !seen.includes(({first})())", arg=list(seen))
        seen.add(page.evaluate(first))
    assert page.url.endswith("?x=gpu_seconds")
    page.reload()
    page.wait_for_selector("#plot-overlap .main-svg >> nth=0")
    assert page.get_attribute("[data-axis=gpu_seconds]", "aria-pressed") == "true"
    assert page.evaluate(first) in seen - {1}


def test_the_first_step_brings_the_figures(visit, platform):
    run_id = platform.submit("letters utilization", steps=5)
    page = visit().page
    page.goto(f"/runs/{run_id}/utilization")
    page.wait_for_selector("#no-devices h2")
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(1)))
    page.wait_for_selector("#devices .card >> text=cpu:0")
    page.wait_for_selector("[data-recent] >> text=last 1 step")
    assert page.locator("#no-devices").is_hidden()
