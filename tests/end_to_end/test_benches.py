"""`oppo bench scheduler`, `oppo bench telemetry` and `oppo bench api` run, and write their figures under their names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1200)

EXAMPLES = Path(__file__).parents[2] / "platform/oppo_platform/api/examples.json"
# What points at the tests' own settings and servers.
OTHERS = ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE")


def compute_figures(bench: str, folder: Path) -> dict[str, Any]:
    """What `oppo bench NAME --quick --json` writes, by the figures' names."""
    file = folder / "figures.json"
    environ = {name: value for name, value in os.environ.items() if name not in OTHERS} | {"OPPO_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "oppo_cli", "bench", bench, "--quick", "--json", str(file)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(file.read_text())
    assert told["bench"] == bench
    return {result["name"]: result for result in told["results"]}


@pytest.mark.full
def test_the_schedulers(tmp_path: Path) -> None:
    figures = compute_figures("scheduler", tmp_path)
    assert {"cycle_ms/100x50", "cycle_ms/1000x200", "quiet_cycle_ms/1000x200", "freed_to_dispatch_ms/p95"} <= set(figures)
    assert {"submit_to_start_s/p95", "submit_to_start_s/engine", "attempts_per_s", "process_start_share"} <= set(figures)
    assert figures["attempts_lost"]["median"] == 0
    assert figures["attempts_doubled"]["median"] == 0
    legs = [figure["median"] for name, figure in figures.items() if name.startswith("submit_to_start_s/") and "p95" not in name]
    assert all(leg > 0 for leg in legs), "the legs follow each other"
    assert figures["placed_a_cycle/1000x200"]["median"] > 1, "a bench of cycles that place nothing would say little"


@pytest.mark.full
def test_telemetrys(tmp_path: Path) -> None:
    figures = compute_figures("telemetry", tmp_path)
    assert {"ingest_points_per_s", "overview_100k_ms/p95", "zoom_100k_ms/p95", "compare_50x1k_ms/p95"} <= set(figures)
    assert {"runs_1k_ms/p95", "timeline_100x8_ms/p95", "event_to_pixel_ms/p95", "first_chart_s", "run_page_kb"} <= set(figures)
    assert {"logging_cost_share", "streams_500_rss_mb", "streams_500_page_ms/p95", "streams_500_lag_ms/p95"} <= set(figures)
    assert {f"timeline_frame_ms/{part}/{way}" for part in ("run", "40_steps") for way in ("canvas", "plotly")} <= set(figures)
    assert figures["spikes_shown"]["median"] == 5
    assert 8 < figures["bytes_per_point"]["median"] < 30


@pytest.mark.full
def test_the_apis(tmp_path: Path) -> None:
    figures = compute_figures("api", tmp_path)
    timed = {name.removesuffix("_ms/p95") for name in figures if name.endswith("_ms/p95")} - {"together"}
    operations = json.loads(EXAMPLES.read_text())
    assert len(timed) == 10
    assert timed <= set(operations), "figures are called after operations"
    assert all(figures[f"{name}_ms/p95"]["median"] >= figures[f"{name}_ms"]["median"] > 0 for name in timed)
    assert figures["requests_per_s"]["n"] == 5
    assert figures["requests_per_s"]["min"] > 1
    assert all(figures[f"request_cpu_ms/{part}"]["median"] > 0.2 for part in ("web", "servers", "clients"))
