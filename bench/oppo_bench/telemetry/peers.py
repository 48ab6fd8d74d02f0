"""`oppo bench telemetry --peers`: the same work on other trackers, in turn with ours, on the same machine and PostgreSQL."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oppo_bench.telemetry import load as load
from oppo_bench.telemetry.pages import KL, REWARD, browser, metric_keys, opened
from oppo_bench.telemetry.platform_backend import Ours
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
            many = dict(zip(metric_keys(MANY_METRICS), load.walks(seed, MANY_METRICS, MANY_STEPS // scale), strict=True))
            _pages(trackers, "run_300_metrics_", many, max(3, repetitions // 3), times, progress)
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
) -> None:  # fmt: skip
    """A run with these metrics opened by a browser with an empty cache: until the first chart, and kilobytes.

    A peer that draws none within 30 s is left out.
    """
    from playwright.sync_api import TimeoutError as NoChart

    able = _able(trackers, "page")
    progress(f"storing a run of {len(columns)} metrics")
    places = {tracker.name: tracker.page(tracker.keep([columns])[0]) for tracker in able}
    with browser() as chromium:
        states = {tracker.name: tracker.logged_in(chromium) if isinstance(tracker, Ours) else None for tracker in able}
        for n in range(-1, repetitions):
            for tracker in list(able):
                progress(f"first chart of {len(columns)} metrics: {tracker.name}")
                try:
                    page = opened(chromium, *places[tracker.name], states[tracker.name])
                except NoChart:
                    if isinstance(tracker, Ours):
                        raise
                    progress(f"none within 30 s, left out: {tracker.name}")
                    able.remove(tracker)
                    continue
                if n >= 0:
                    times[f"{prefix}first_chart_s"][tracker.name].append(page.seconds)
                    times[f"{prefix}page_kb"][tracker.name].append(page.kb)


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
        if work in ("spikes_shown", "points_shown"):
            continue
        for name, values in measured.items():
            if name != Ours.name:
                ratios = [theirs / ours for theirs, ours in zip(values, measured[Ours.name], strict=True)]
                results.append(Result.of(f"{work}/{name}/ours_times_better", "ratio", ratios))
    return results
