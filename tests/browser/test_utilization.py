"""The Utilization tab: figures of the last steps as they are stored, idle time by cause, what is not measured said plainly."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_idle_time_is_told_by_device_and_cause(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/utilization")
    page.wait_for_selector("#plot-causes .main-svg >> nth=0")
    page.wait_for_function("() => document.getElementById('plot-overlap').data?.[0].x.length === 60")
    bubble = page.evaluate(
        """async id => {
            const api = await import("/static/js/core/api.js");
            const { series } = await api.get(`runs/${id}/metrics`, { keys: 'bubble/*', since_step: 10 });
            const all = Object.values(series).flatMap(c => c.y);
            return 100 * all.reduce((a, b) => a + b, 0) / all.length;
        }""",
        two_runs[1],
    )
    expect(page.locator("#at-causes")).to_have_text(f"{bubble:.1f} %")
    shares = [float(cell.split()[0]) for cell in page.locator("#causes td:nth-child(2)").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert abs(sum(shares) - bubble) < 0.5
    cards = page.locator("#devices .card")
    expect(cards.nth(1).locator("h3")).to_have_text("cpu:1")
    expect(cards.nth(1)).to_contain_text("reward, reference, critic")
    expect(cards.nth(1)).to_contain_text("mostly waiting for: decode")
    expect(page.locator("#advice")).to_contain_text("Largest cause, decode")
    expect(page.locator("#unmeasured")).to_contain_text("Not recorded by this run: memory")
    expect(page.locator("#memory-card")).to_be_hidden()
    first = "() => document.getElementById('plot-overlap').data?.[0].x[0]"
    assert page.evaluate(first) == 1
    seen = {1}
    for axis in ("wall", "tokens", "gpu_seconds"):
        page.click(f"[data-axis={axis}]")
        page.wait_for_function(f"seen => !seen.includes(({first})())", arg=list(seen))
        seen.add(page.evaluate(first))
    page.wait_for_url("**?x=gpu_seconds")
    page.reload()
    page.wait_for_selector("#plot-overlap .main-svg >> nth=0")
    expect(page.locator("[data-axis=gpu_seconds]")).to_have_attribute("aria-pressed", "true")
    page.wait_for_function(f"seen => seen.includes(({first})())", arg=list(seen - {1}))


def test_the_first_step_brings_the_figures(visit, platform):
    run_id = platform.submit("letters utilization", steps=5)
    page = visit().page
    page.goto(f"/runs/{run_id}/utilization")
    page.wait_for_selector("#no-devices h2")
    supervisor, story = platform.start(run_id)
    supervisor.tell(list(story.tell(1)))
    page.wait_for_selector("#devices .card >> text=cpu:0")
    page.wait_for_selector("[data-recent] >> text=last 1 step")
    expect(page.locator("#no-devices")).to_be_hidden()


def test_idle_shares_are_of_the_devices_that_told_of_a_step(visit, two_runs):
    page = visit().page
    page.goto(f"/runs/{two_runs[1]}/utilization")
    page.wait_for_selector("#plot-causes .main-svg >> nth=0")
    told = """async () => {
      const { runSeries } = await import("/static/js/run/series.js");
      const { idleShares } = await import("/static/js/run/idle-shares.js");
      const over = (step, y) => ({ step, x: step, y }), before = [1, 2], since = [3, 4];
      const told = { "bubble/cpu:0": over(before, [0.5, 0.75]), "idle_s/cpu:0/decode": over(before, [1, 1]),
        "bubble/cuda:0": over(since, [0.25, 0.5]), "idle_s/cuda:0/tail": over(since, [2, 2]) };
      const { fetch } = window;
      window.fetch = async () => Response.json({ series: told, last_step: 4 });
      const series = runSeries(1, []);
      await series.update({ step: 4 });
      window.fetch = fetch;
      const found = idleShares(series, ["cpu:0", "cuda:0"], ["decode", "tail"]);
      return [found.base.step, found.bubble, found.shares.decode, found.shares.tail];
    }"""
    assert page.evaluate(told) == [[1, 2, 3, 4], [50, 75, 25, 50], [50, 75, 0, 0], [0, 0, 25, 50]]


def test_gpu_driver_metrics_have_a_chart(visit, platform):
    run_id = platform.submit("letters driver", steps=5)
    supervisor, story = platform.start(run_id)
    events = list(story.tell(3))
    told = {
        "nvml/cuda:0/utilization": 0.9,
        "nvml/cuda:0/memory_gb": 60.0,
        "gpm/cuda:0/sm_util": 0.5,
        "gpm/cuda:0/dram_util": 0.25,
    }
    for event in events:
        if event.kind == "step":
            event.metrics.update(told | {"perf/max_memory_allocated_gb": 40.0})
    supervisor.tell(events)
    page = visit().page
    page.goto(f"/runs/{run_id}/utilization")
    page.wait_for_selector("#plot-driver .main-svg >> nth=0")
    expect(page.locator("#driver-legend li")).to_have_text(["NVML", "SM active", "memory"], use_inner_text=True)
    lines = page.evaluate("() => document.getElementById('plot-driver').data.map(line => [line.name, line.y[0]])")
    assert sorted(lines) == [["NVML", 90], ["SM active", 50], ["memory", 25]]
    moved_on = """async () => {
      const { driverLines, CHARTS } = await import("/static/js/run/utilization-charts.js");
      const { run } = await import("/static/js/run/store.js");
      const latest = { ...run.summary.latest, "nvml/cuda:1/utilization": null };
      const until = (end) => ({ x: Array.from({ length: end }, (_, i) => i + 1), y: Array(end).fill(0.5) });
      const get = (key) => until(key.startsWith("nvml") ? 2 : 3);
      return [driverLines(latest).map(({ name }) => name), CHARTS.driver({ weight: 0, series: { get } }).column.x.length];
    }"""
    named, reach = page.evaluate(moved_on)
    assert named == ["NVML", "SM active", "memory"], "a GPU that an earlier attempt had takes no line away"
    assert reach == 3, "the axis holds the line that reaches furthest"
    expect(page.locator("#memory-card")).to_be_visible()
    expect(page.locator("#unmeasured-words")).not_to_contain_text("Not recorded")


def test_resident_memory_has_a_chart_without_a_gpu(visit, platform):
    run_id = platform.submit("letters resident", steps=5)
    supervisor, story = platform.start(run_id)
    events = list(story.tell(3))
    for event in events:
        if event.kind == "step":
            event.metrics.update({"perf/rss_gb": 3.25})
    supervisor.tell(events)
    page = visit().page
    page.goto(f"/runs/{run_id}/utilization")
    page.wait_for_selector("#plot-resident .main-svg >> nth=0")
    expect(page.locator("#at-resident")).to_have_text("3.3 GB")
    expect(page.locator("#memory-card")).to_be_hidden()
    expect(page.locator("#unmeasured-words")).not_to_contain_text("memory")


def of_many_devices(events, busy):
    """The events, each step told of 18 GPUs: `busy(step, k)` is the share of GPU k."""
    for event in events:
        if event.kind == "step":
            rest = {key: value for key, value in event.metrics.items() if not key.startswith(("busy/", "bubble/", "idle_s/"))}
            shares = {f"cuda:{k:02}": busy(event.step, k) for k in range(18)}
            rest |= {f"busy/{d}": share for d, share in shares.items()} | {f"bubble/{d}": 1 - s for d, s in shares.items()}
            event.metrics.clear()
            event.metrics.update(rest)
    return events


def test_of_many_devices_the_least_busy_of_the_last_steps_have_cards(visit, platform):
    run_id = platform.submit("letters many devices", steps=20)
    supervisor, story = platform.start(run_id)
    odd = {0: 0.7, 17: 0.6}  # in the last step alone: more than 16's 0.66, and less
    first = of_many_devices(list(story.tell(5)), lambda step, k: odd.get(k, 0.5 + k / 100) if step == 5 else 0.5 + k / 100)
    supervisor.tell(first)
    page = visit().page
    page.goto(f"/runs/{run_id}/utilization")
    headings = page.locator("#devices h3")
    expect(headings).to_have_text([f"cuda:{k:02}" for k in range(16)])
    page.evaluate("() => { window.kept = document.querySelector('[data-device=\"cuda:00\"]'); }")
    supervisor.tell(of_many_devices(list(story.tell(5)), lambda step, k: 1.0 if k == 3 else 0.5 + k / 100))
    expect(headings).to_have_text([f"cuda:{k:02}" for k in range(17) if k != 3])
    expect(page.locator("#least")).to_have_text("The 16 least busy of 18 devices.")
    assert page.evaluate("() => window.kept.isConnected"), "a card that stays is not made anew"
