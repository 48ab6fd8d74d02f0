"""`oppo bench telemetry` runs, and writes the figures under their names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# What points at the tests' own settings and servers.
OTHERS = ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE")


@pytest.mark.full
def test_the_telemetry_bench_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    environ = {name: value for name, value in os.environ.items() if name not in OTHERS}
    command = [sys.executable, "-m", "oppo_cli", "bench", "telemetry", "--quick", "--json", str(file)]
    done = subprocess.run(
        command, env=environ | {"OPPO_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(file.read_text())
    figures = {result["name"]: result for result in told["results"]}
    assert told["bench"] == "telemetry"
    assert {"ingest_points_per_s", "overview_100k_ms/p95", "zoom_100k_ms/p95", "compare_50x1k_ms/p95", "runs_1k_ms/p95"} <= set(
        figures
    )
    assert {"timeline_100x8_ms/p95", "event_to_pixel_ms/p95", "first_chart_s", "run_page_kb"} <= set(figures)
    assert figures["spikes_shown"]["median"] == 5
    assert 8 < figures["bytes_per_point"]["median"] < 30
