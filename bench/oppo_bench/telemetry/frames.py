"""Frame times of a panned timeline, canvas against Plotly, for `oppo bench telemetry`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oppo_bench.telemetry import load as load
from oppo_bench.telemetry.pages import REWARD, SIZE, browser, logged_in

if TYPE_CHECKING:
    from oppo_bench.document import Result

DEVICES = 8
FRAMES = 20
# Pans to and fro, one move a frame; milliseconds from one frame to the next.
MOVES = {
    "canvas": """(i) => document.getElementById("lanes").dispatchEvent(
        new KeyboardEvent("keydown", { key: i % 2 ? "ArrowLeft" : "ArrowRight" }))""",
    "plotly": """(i) => {
        const plot = document.getElementById("figure-plot"), [a, b] = plot.layout.xaxis.range;
        const by = (b - a) * (i % 2 ? -0.2 : 0.2);
        return Plotly.relayout(plot, { "xaxis.range": [a + by, b + by] });
    }""",
}
PAN = """async (count) => {
  const move = %s, frame = () => new Promise(requestAnimationFrame), taken = [];
  await frame();
  for (let i = 0, last = performance.now(); i < count; i += 1) {
    await move(i);
    await frame();
    const now = performance.now();
    taken.push(now - last);
    last = now;
  }
  return taken;
}"""
# The window has the requested width, give or take one step at either end.
SHOWS = """(count) => {
  const [, first, last] = /^steps ([\\d,]+)–([\\d,]+)/.exec(document.getElementById("range").textContent) || [];
  const [a, b] = [first, last].map((text) => Number((text || "").replace(/,/g, "")));
  return Math.abs(b - a + 1 - count) <= 2;
}"""
MIDDLE = """() => { const p = document.getElementById('figure-plot'), [a, b] = p._fullLayout.xaxis.range;
  return Plotly.relayout(p, { 'xaxis.range': [a + (b - a) / 4, b - (b - a) / 4] }); }"""


def timeline_frames(base_url: str, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """A timeline panned on the page's canvas and as a Plotly figure: zoomed out, and with every span of 40 steps."""
    from oppo_bench.document import Result

    steps = 1000 // scale
    [run] = load.runs(owner, 1, [REWARD])
    run.step = steps  # the page's first request
    run.save(update_fields=["step"])
    attempt = run.attempts.get()
    attempt.engine_started_at, attempt.device_names = 0.0, [f"cuda:{n}" for n in range(DEVICES)]
    attempt.save()
    load.keep_history(attempt, {REWARD: load.walks(seed, 1, steps)[0]})
    load.keep_timeline(attempt, steps, DEVICES)
    results = []
    with browser() as chromium:
        context = chromium.new_context(storage_state=logged_in(chromium, base_url, owner.user), viewport=SIZE)
        page = context.new_page()
        for name, (first, last) in {"run": (0, steps), "40_steps": (steps // 2, steps // 2 + 40)}.items():
            page.goto(f"{base_url}/runs/{run.pk}/timeline?window={first}-{last}")
            page.wait_for_selector("#worst li")
            page.wait_for_function(SHOWS, arg=last - first)
            page.click("[data-zoom=in]")
            page.click("#figure")
            page.wait_for_selector("#figure-plot .main-svg .barlayer path", state="attached")
            page.evaluate(MIDDLE)
            taken: dict[str, list[float]] = {kind: [] for kind in MOVES}
            for _ in range(repetitions):
                for kind, move in MOVES.items():
                    taken[kind] += page.evaluate(PAN % move, FRAMES)
            results += [Result.of(f"timeline_frame_ms/{name}/{kind}", "ms", each) for kind, each in taken.items()]
    return results
