"""`oppo bench telemetry --peers`: the same work on other trackers, in turn with ours, on the same machine and PostgreSQL."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oppo_bench.telemetry import load as load
from oppo_bench.telemetry.pages import COMPARED_COLD, KL, REWARD, browser, metric_keys, opened, seconds_until
from oppo_bench.telemetry.platform_backend import Ours
from oppo_bench.telemetry.series import SAMPLES
from oppo_cli.home import Failure

if TYPE_CHECKING:
    import httpx

    from oppo_bench.document import Result
    from oppo_bench.telemetry.peer_trackers.tracker import Columns, Tracker

METRICS, STEPS = 20, 10_000
MANY_METRICS, MANY_STEPS = 300, 20_000
LONG, SPIKES = 1_000_000, (17, 250_000, 500_001, 777_777, 999_990)
COMPARED, COMPARED_STEPS = 50, 10_000
LISTED, METRICS_LISTED, ROWS = 10_000, 40, 50
SHOWN = 20  # samples of a page
REPETITIONS, QUICK = 10, 2
SPIKE = 10_000.0  # above all other values, and exact in float32
Progress = Callable[[str], None]
Times = dict[str, dict[str, list[float]]]  # work → tracker → one figure per repetition


def race(
    client: httpx.Client, base_url: str, owner: load.Tenant, kept: Path, scale: int, seed: int, progress: Progress
) -> list[Result]:
    """Every piece of work on every tracker that can do it, in turn in each repetition.

    Storage and polling are each tracker's own. Pages are opened first, while a tracker holds one run only; that of a run with 300
    metrics last, because it would make the other work harder.

    Args:
        kept: folder of the trackers' environments.

    Raises:
        Failure: a tracker could not be installed or started, or failed at its work.
    """
    from oppo_bench.telemetry.peer_trackers.tracker import TrackerError

    times: Times = defaultdict(lambda: defaultdict(list))
    repetitions = QUICK if scale > 1 else REPETITIONS
    try:
        with _peers(kept, progress) as peers:
            trackers: list[Tracker] = [Ours(client, base_url, owner), *peers]
            reward, kl = load.walks(seed, 2, STEPS // scale)
            _pages(trackers, "", {REWARD: reward, KL: abs(kl)}, max(3, repetitions // 3), times, progress)
            _ingest(trackers, scale, seed, max(1, repetitions // 4), times, progress)
            _long(trackers, scale, seed, repetitions, times, progress)
            _compare(trackers, scale, seed, repetitions, times, progress)
            _table(trackers, scale, repetitions, times, progress)
            _samples(trackers, scale, seed, repetitions, times, progress)
            _compare_cold(trackers, scale, seed, max(3, repetitions // 3), times, progress)
            _many_metrics(trackers, scale, seed, max(3, repetitions // 3), times, progress)
    except TrackerError as error:
        raise Failure(str(error)) from error
    return to_results(times)


@contextmanager
def _peers(kept: Path, progress: Progress) -> Iterator[list[Tracker]]:
    """MLflow, trackio and TensorBoard, each in its own environment, with its server."""
    from oppo_bench.peer_environment import TENSORBOARD, TRACKIO, PeerEnvironmentError, ensure_environment
    from oppo_bench.telemetry.peer_trackers.mlflow import mlflow_server
    from oppo_bench.telemetry.peer_trackers.tensorboard import TensorBoard
    from oppo_bench.telemetry.peer_trackers.trackio import Trackio
    from oppo_platform.embedded.ports import saved_port

    home = Path(os.environ["OPPO_HOME"])
    with ExitStack() as stack:
        peers: list[Any] = [stack.enter_context(mlflow_server(kept, progress))]
        for packages, make in ((TRACKIO, Trackio), (TENSORBOARD, TensorBoard)):
            try:
                python = ensure_environment(kept / packages.name.lower(), packages, progress)
            except PeerEnvironmentError as error:
                raise Failure(str(error)) from error
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="oppo-bench-", ignore_cleanup_errors=True))
            peers.append(make(python, saved_port(home, packages.name), Path(folder)))
            stack.callback(peers[-1].close)
        yield peers


def _able(trackers: Sequence[Tracker], work: str) -> list[Tracker]:
    return [tracker for tracker in trackers if work in tracker.can]


def _pages(
    trackers: Sequence[Tracker], prefix: str, columns: Columns, repetitions: int, times: Times, progress: Progress
) -> dict[str, str]:  # fmt: skip
    """A run with these metrics opened by a browser with an empty cache: until the first chart, and kilobytes.

    Returns the run of each tracker that draws one.
    """
    able = _able(trackers, "page")
    progress(f"storing a run of {len(columns)} metrics")
    kept = {tracker.name: tracker.keep([columns])[0] for tracker in able}

    def measure(chromium: Any, tracker: Tracker, state: Any) -> dict[str, float]:
        page = opened(chromium, *tracker.page(kept[tracker.name]), state)
        return {f"{prefix}first_chart_s": page.seconds, f"{prefix}page_kb": page.kb}

    drawing = _browse(able, f"first chart of {len(columns)} metrics", measure, repetitions, times, progress)
    return {name: kept[name] for name in drawing}


def _browse(
    trackers: Sequence[Tracker], what: str, measure: Callable[[Any, Tracker, Any], Mapping[str, float]], repetitions: int,
    times: Times, progress: Progress,
) -> list[str]:  # fmt: skip
    """Figures of pages in a browser, in turn; the first of each are left out, and so is a peer that draws nothing within 30 s.

    Returns the names of those that draw.
    """
    from playwright.sync_api import TimeoutError as NoChart

    able = list(trackers)
    with browser() as chromium:
        states = {tracker.name: tracker.logged_in(chromium) if isinstance(tracker, Ours) else None for tracker in able}
        for n in range(-1, repetitions):
            for tracker in list(able):
                progress(f"{what}: {tracker.name}")
                try:
                    measured = measure(chromium, tracker, states[tracker.name])
                except NoChart:
                    if isinstance(tracker, Ours):
                        raise
                    progress(f"none within 30 s, left out: {tracker.name}")
                    able.remove(tracker)
                    continue
                for work, figure in measured.items() if n >= 0 else ():
                    times[work][tracker.name].append(figure)
    return [tracker.name for tracker in able]


def _many_metrics(trackers: Sequence[Tracker], scale: int, seed: int, repetitions: int, times: Times, progress: Progress) -> None:
    """A run of 300 metrics: until its first chart, and, all its metrics in the window, until every chart there is drawn."""
    columns = dict(zip(metric_keys(MANY_METRICS), load.walks(seed, MANY_METRICS, MANY_STEPS // scale), strict=True))
    kept = _pages(trackers, "run_300_metrics_", columns, repetitions, times, progress)

    def measure(chromium: Any, tracker: Tracker, state: Any) -> dict[str, float]:
        seconds, charts = seconds_until(chromium, *tracker.screen(kept[tracker.name]), state)
        return {"run_300_metrics_screen_s": seconds, "run_300_metrics_screen_charts_shown": charts}

    able = [tracker for tracker in _able(trackers, "screen") if tracker.name in kept]
    _browse(able, "all charts in the window", measure, repetitions, times, progress)


def _compare_cold(trackers: Sequence[Tracker], scale: int, seed: int, repetitions: int, times: Times, progress: Progress) -> None:
    """The page that compares a metric of 60 runs, until all its curves are drawn."""
    able = _able(trackers, "compare_page")
    columns: list[Columns] = [{REWARD: values} for values in load.walks(seed, COMPARED_COLD, COMPARED_STEPS // scale)]
    kept = {tracker.name: tracker.keep(columns) for tracker in able}

    def measure(chromium: Any, tracker: Tracker, state: Any) -> dict[str, float]:
        seconds, _ = seconds_until(chromium, *tracker.compare_page(kept[tracker.name], REWARD), state)
        return {f"compare_{COMPARED_COLD}_cold_s": seconds}

    _browse(able, f"{COMPARED_COLD} runs compared", measure, repetitions, times, progress)


def _samples(trackers: Sequence[Tracker], scale: int, seed: int, repetitions: int, times: Times, progress: Progress) -> None:
    """Of a run's 50,000 samples those with the highest rewards, and those with two words."""
    able, kept = _able(trackers, "samples"), {}
    for tracker in able:
        progress(f"samples: {tracker.name}")
        kept[tracker.name] = tracker.keep_samples(SAMPLES // scale, seed)
    in_turn(able, "samples_by_score_ms", lambda each, n: each.best_samples(kept[each.name], SHOWN), repetitions, times)
    words = ("word7", "word11")
    in_turn(able, "samples_search_ms", lambda each, n: each.find_samples(kept[each.name], words, SHOWN), repetitions, times)


def _ingest(trackers: Sequence[Tracker], scale: int, seed: int, repetitions: int, times: Times, progress: Progress) -> None:
    """20 metrics × 10,000 steps over HTTP until every point can be read; then bytes per point on disk."""
    able = _able(trackers, "ingest")
    points = METRICS * STEPS // scale
    before = {tracker.name: tracker.stored_bytes() for tracker in able}
    for n in range(repetitions):
        columns = {f"walk/{k}": values for k, values in enumerate(load.walks(seed + n, METRICS, STEPS // scale))}
        for tracker in able:
            progress(f"ingest: {tracker.name}")
            times["us_per_point"][tracker.name].append(1e6 * tracker.ingest(columns) / points)
    for tracker in able:
        taken = tracker.stored_bytes() - before[tracker.name]
        times["bytes_per_point"][tracker.name].append(taken / (points * repetitions))


def _long(trackers: Sequence[Tracker], scale: int, seed: int, repetitions: int, times: Times, progress: Progress) -> None:
    """One series of 1,000,000 points with five spikes of one step each: all of it, and a hundredth of it."""
    length = LONG // scale
    values = load.walks(seed, 1, length)[0]
    values[[place // scale for place in SPIKES]] = top = float(round(values.max()) + SPIKE)
    kept: dict[str, str] = {}
    for tracker in _able(trackers, "overview"):
        progress(f"a long series: {tracker.name}")
        [kept[tracker.name]] = tracker.keep([{"walk": values}])

    def zoom(tracker: Tracker, n: int) -> None:
        first = 1 + n * length // (repetitions + 2)
        tracker.zoom(kept[tracker.name], "walk", first, first + length // 100)

    for tracker in _able(trackers, "overview"):
        shown = tracker.overview(kept[tracker.name], "walk")
        times["spikes_shown"][tracker.name] = [float(sum(value > top - SPIKE / 2 for value in shown))]
        times["points_shown"][tracker.name] = [float(len(shown))]
    in_turn(
        _able(trackers, "overview"), "overview_ms", lambda each, n: each.overview(kept[each.name], "walk"), repetitions, times
    )
    in_turn(_able(trackers, "zoom"), "zoom_ms", zoom, repetitions, times)


def _compare(trackers: Sequence[Tracker], scale: int, seed: int, repetitions: int, times: Times, progress: Progress) -> None:
    """One metric of 50 runs of 10,000 steps, in one request."""
    columns: list[Columns] = [{"compared": values} for values in load.walks(seed, COMPARED, COMPARED_STEPS // scale)]
    kept: dict[str, list[str]] = {}
    for tracker in _able(trackers, "compare"):
        progress(f"fifty runs: {tracker.name}")
        kept[tracker.name] = tracker.keep(columns)
        times["compare_kb"][tracker.name] = [tracker.compare(kept[tracker.name], "compared") / 1e3]
    able = _able(trackers, "compare")
    in_turn(able, "compare_ms", lambda each, n: each.compare(kept[each.name], "compared"), repetitions, times)


def _table(trackers: Sequence[Tracker], scale: int, repetitions: int, times: Times, progress: Progress) -> None:
    """The first 50 of 10,000 runs with 40 metrics each, sorted by one of them."""
    keys, able = [f"m/{n}" for n in range(METRICS_LISTED)], _able(trackers, "table")
    for tracker in able:
        progress(f"many runs: {tracker.name}")
        tracker.list_runs(LISTED // scale, keys)
    in_turn(able, "runs_ms", lambda each, n: each.table(keys[n % METRICS_LISTED], ROWS), repetitions, times)


def in_turn(able: Sequence[Any], work: str, do: Callable[[Any, int], Any], repetitions: int, times: Times) -> None:
    """Milliseconds of each call, in turn; the first two of each are left out."""
    for n in range(-2, repetitions):
        for tracker in able:
            start = time.perf_counter()
            do(tracker, n + 2)
            if n >= 0:
                times[work][tracker.name].append(1e3 * (time.perf_counter() - start))


def to_results(times: Times) -> list[Result]:
    """All figures, and the ratio to ours per repetition."""
    from oppo_bench.document import Result

    results = []
    for work, measured in times.items():
        unit = work.rpartition("_")[2]
        for name, values in measured.items():
            results.append(Result.of(f"{work}/{name}", unit, values))
        if unit == "shown":
            continue
        for name, values in measured.items():
            if name != Ours.name:
                ratios = [theirs / ours for theirs, ours in zip(values, measured[Ours.name], strict=True)]
                results.append(Result.of(f"{work}/{name}/ours_times_better", "ratio", ratios))
    return results
