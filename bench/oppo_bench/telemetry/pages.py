"""Pages in a real browser, for `oppo bench telemetry`: time to the first chart, and from an engine's event to the chart."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oppo_bench.platform_stack import running_platform, tiny_run, wait_for
from oppo_bench.telemetry import load as load

if TYPE_CHECKING:
    from oppo_bench.document import Result

REWARD, KL = "critic/score/mean", "objective/kl"
PLOTLY_CURVE = ".main-svg .scatterlayer path.js-line"
CURVE = f"path.curve, {PLOTLY_CURVE}"  # one that the page draws while Plotly is loaded counts
CHART, PLOTLY = f"#plot-reward :is({CURVE})", f"#plot-reward {PLOTLY_CURVE}"
SIZE = {"width": 1440, "height": 900}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COMPARED_COLD = 60
# Records in the page when a function is true: while a page executes Plotly, it does not answer Playwright for up to a second.
SEEN = """(() => {
  const ready = READY;
  const look = () => {
    const returned = ready();
    if (returned) window.readySeen = [Date.now(), returned];
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})()"""
# Records the time of each step in the picture: after the frame in which the chart has it.
WATCH = """() => {
  window.seenSteps = {};
  const look = () => {
    const plot = document.getElementById("plot-reward");
    const last = Math.max(0, ...((plot && plot.data) || []).map((trace) => (trace.x || []).slice(-1)[0] || 0));
    if (last && !(last in window.seenSteps)) window.seenSteps[last] = Date.now();
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium: $OPPO_CHROMIUM, one on PATH, or Playwright's own."""
    from playwright.sync_api import sync_playwright

    os.environ.setdefault("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # Playwright's event loop runs in this thread
    path = os.environ.get("OPPO_CHROMIUM") or next(filter(None, map(shutil.which, COMMANDS)), None)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield chromium
        finally:
            chromium.close()


def logged_in(chromium: Any, base_url: str, user: Any) -> Any:
    """Session cookie of a logged-in user."""
    from oppo_platform.accounts.services import create_login_link

    context = chromium.new_context(base_url=base_url)
    page = context.new_page()
    page.goto(f"{base_url}/login-link/{create_login_link(user).rpartition('/')[2]}")
    state = context.storage_state()
    context.close()
    return state


def first_chart(base_url: str, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """A run of 10,000 steps opened with an empty cache: seconds to the first curve, and to Plotly's; kilobytes until the first
    curve, and in total.
    """
    from oppo_bench.document import Result

    [run] = load.runs(owner, 1, [REWARD, KL])
    reward, kl = load.walks(seed, 2, 10_000 // scale)
    load.keep_history(run.attempts.get(), {REWARD: reward, KL: abs(kl)})
    taken: dict[str, list[float]] = {CHART: [], PLOTLY: []}
    sizes, first_sizes = [], []
    with browser() as chromium:
        state = logged_in(chromium, base_url, owner.user)
        for n in range(-1, repetitions):
            for chart in taken:
                page = opened(chromium, f"{base_url}/runs/{run.pk}", chart, state)
                assert not page.elsewhere, f"the page asked elsewhere: {page.elsewhere}"
                if n >= 0:
                    taken[chart].append(page.seconds)
                    sizes.append(page.kb)
                    first_sizes += [page.first_kb] if chart == CHART else []
    return [
        Result.of("first_chart_s", "s", taken[CHART]), Result.of("first_plotly_chart_s", "s", taken[PLOTLY]),
        Result.of("first_chart_kb", "kB", first_sizes), Result.of("run_page_kb", "kB", sizes),
    ]  # fmt: skip


def many_metrics(base_url: str, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """A run of 300 metrics in 20,000 steps, opened with an empty cache: seconds to the first curve, and from there by a jump to
    all metrics until every chart in the window has its curve, and until Plotly has drawn them. Beside them the first curve of a
    run of 12 metrics, in turn.
    """
    from oppo_bench.document import Result

    many, few = "run_300_metrics_first_chart_s", "run_12_metrics_first_chart_s"
    screens = {"run_300_metrics_screen_s": screen(CURVE), "run_300_metrics_screen_plotly_s": screen(PLOTLY_CURVE)}
    urls = {
        name: f"{base_url}/runs/{_kept_run(owner, count, 20_000 // scale, seed)}"
        for name, count in ((many, 300 // scale), (few, 12))
    }
    taken: dict[str, list[float]] = {name: [] for name in (*urls, *screens)}
    with browser() as chromium:
        state = logged_in(chromium, base_url, owner.user)
        for n in range(-1, repetitions):
            for name, url in urls.items():
                context = chromium.new_context(storage_state=state, viewport=SIZE)
                page = context.new_page()
                began, drawn, _ = _open_until(page, url, visible(CHART))
                took = {name: drawn - began}
                if name == many:
                    page.wait_for_function("() => document.querySelectorAll('.metric').length > 3")
                    start = time.perf_counter()
                    page.evaluate("document.getElementById('metric-groups').scrollIntoView()")
                    for figure, ready in screens.items():
                        page.wait_for_function(ready)
                        took[figure] = time.perf_counter() - start
                for figure, seconds in took.items():
                    taken[figure] += [seconds] if n >= 0 else []
                context.close()
    return [Result.of(name, "s", each) for name, each in taken.items()]


def metric_keys(count: int) -> list[str]:
    """Reward, KL and custom metrics, `count` in all."""
    return [REWARD, KL, *(f"custom/metric_{n:03}" for n in range(count - 2))]


def _kept_run(owner: load.Tenant, metrics: int, steps: int, seed: int) -> int:
    keys = metric_keys(metrics)
    [run] = load.runs(owner, 1, keys)
    load.keep_history(run.attempts.get(), dict(zip(keys, load.walks(seed, metrics, steps), strict=True)))
    return int(run.pk)


def compare_cold(base_url: str, owner: load.Tenant, scale: int, repetitions: int, seed: int) -> list[Result]:
    """60 runs of 10,000 steps compared with an empty cache: seconds until all their curves are drawn, and until Plotly's are."""
    from oppo_bench.document import Result

    made = load.runs(owner, COMPARED_COLD, [REWARD, KL, "bubble/gpu:0"])
    for n, run in enumerate(made):
        reward, kl, bubble = load.walks(seed + n, 3, 10_000 // scale)
        load.keep_history(run.attempts.get(), {REWARD: reward, KL: abs(kl), "bubble/gpu:0": abs(bubble)})
    url = f"{base_url}/compare?runs={','.join(str(run.pk) for run in made)}"
    ready = {"compare_60_cold_s": all_drawn(CHART, COMPARED_COLD), "compare_60_plotly_s": all_drawn(PLOTLY, COMPARED_COLD)}
    taken: dict[str, list[float]] = {name: [] for name in ready}
    with browser() as chromium:
        state = logged_in(chromium, base_url, owner.user)
        for n in range(-1, repetitions):
            for name, function in ready.items():
                seconds, _ = seconds_until(chromium, url, function, state)
                taken[name] += [seconds] if n >= 0 else []
    return [Result.of(name, "s", each) for name, each in taken.items()]


def seconds_until(chromium: Any, url: str, ready: str, state: Any = None) -> tuple[float, Any]:
    """Open a page with an empty cache: seconds until this JavaScript function is true, and what it returned.

    Raises playwright's `TimeoutError` after 30 s.
    """
    with closing(chromium.new_context(storage_state=state, viewport=SIZE)) as context:
        start, end, returned = _open_until(context.new_page(), url, ready)
        return end - start, returned


def _open_until(page: Any, url: str, ready: str) -> tuple[float, float, Any]:
    """When opening began and the function was true, in seconds of the system's clock, and what it returned."""
    page.add_init_script(SEEN.replace("READY", ready))
    start = time.time()
    page.goto(url, wait_until="commit")
    at, returned = page.wait_for_function("() => window.readySeen").json_value()
    return start, at / 1e3, returned


def all_drawn(selector: str, count: int) -> str:
    """JavaScript function: whether the page has so many such elements."""
    return f"() => document.querySelectorAll({json.dumps(selector)}).length >= {count}"


def screen(curve: str) -> str:
    """JavaScript function: the number of metrics in the window, once each has such an element. It reads the rectangles of
    the cards alone: that of an element in a card out of view would make Chromium lay out the card.
    """
    return f"""() => {{
      const cards = [...document.querySelectorAll(".metric")].filter((card) => {{
        const {{ top, bottom, height }} = card.getBoundingClientRect();
        return height && bottom > 0 && top < innerHeight;
      }});
      return cards.every((card) => card.querySelector({json.dumps(curve)})) && cards.length;
    }}"""


def visible(selector: str) -> str:
    """JavaScript function: whether an element is on the page and has a size."""
    return f"""() => [...document.querySelectorAll({json.dumps(selector)})].some((found) => {{
      const {{ width, height }} = found.getBoundingClientRect();
      return width && height;
    }})"""


class Opened(NamedTuple):
    """Seconds until the first chart, kB transferred until then and in total, and URLs of other origins that were requested."""

    seconds: float
    first_kb: float
    kb: float
    elsewhere: list[str]


def opened(chromium: Any, url: str, chart: str, state: Any = None) -> Opened:
    """Open a page with an empty cache. Raises playwright's `TimeoutError` if no chart is drawn within 30 s."""
    with closing(chromium.new_context(storage_state=state, viewport=SIZE)) as context:
        return _opened(context, url, chart)


def _opened(context: Any, url: str, chart: str) -> Opened:
    page, received, arrived, asked, clocks = context.new_page(), [0.0], [], [], []
    network = context.new_cdp_session(page)
    network.send("Network.enable")
    network.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
    # Also of unfinished responses. Timestamps are of the browser's clock; requests have the system's time beside it.
    network.on("Network.dataReceived", lambda event: arrived.append((event["timestamp"], event["encodedDataLength"])))
    network.on("Network.requestWillBeSent", lambda event: clocks.append(event["wallTime"] - event["timestamp"]))
    page.on("request", lambda request: asked.append(request.url))
    start, drawn, _ = _open_until(page, url, visible(chart))
    page.wait_for_load_state("load")
    page.wait_for_timeout(2000)  # Plotly, which pages load last
    first = sum(size for at, size in arrived if at + clocks[0] <= drawn)
    own = "/".join(url.split("/")[:3])
    elsewhere = [url for url in asked if not url.startswith((own, "data:", "blob:"))]
    return Opened(drawn - start, first / 1e3, sum(received) / 1e3, elsewhere)


def event_to_pixel() -> list[Result]:
    """From an engine's line in its outbox through supervisor, ingest and stream to the frame in which a page shows the step."""
    from oppo_bench.document import Result
    from oppo_bench.telemetry import paced_engine
    from oppo_platform.accounts.models import User

    engine = shlex.join([sys.executable, "-I", "-S", paced_engine.__file__])
    with running_platform(1, {"OPPO_ENGINE_COMMAND": engine}) as running, browser() as chromium:
        base_url = running.stack.local_url()
        state = logged_in(chromium, base_url, User.objects.get())
        run = running.submit(tiny_run("pixel", paced_engine.STEPS))
        page = chromium.new_context(storage_state=state, viewport=SIZE).new_page()
        page.goto(f"{base_url}/runs/{run}")
        page.evaluate(WATCH)
        wait_for(lambda: running.ended([run]), "the run's end")
        page.wait_for_function(f"() => {paced_engine.STEPS} in window.seenSteps")
        seen = {int(step): ms for step, ms in page.evaluate("window.seenSteps").items()}
        [file] = _written(running.stack.home.path)
        written = {int(step): at for step, at in json.loads(file.read_text()).items()}
    # A step that arrived together with a newer one is drawn with that one.
    shown = {step: min(ms for later, ms in seen.items() if later >= step) for step in written}
    taken = [shown[step] - 1e3 * at for step, at in written.items()]
    return [Result.tail("event_to_pixel_ms/p95", "ms", taken), Result.of("event_to_pixel_ms", "ms", taken)]


def _written(home: Path) -> list[Path]:
    return list(home.glob("artifacts/**/steps.json"))
