"""`oppo bench scheduler` runs, gives GPUs away, and writes the figures under their names."""

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
def test_the_schedulers_bench_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    environ = {name: value for name, value in os.environ.items() if name not in OTHERS}
    command = [sys.executable, "-m", "oppo_cli", "bench", "scheduler", "--quick", "--json", str(file)]
    done = subprocess.run(
        command, env=environ | {"OPPO_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(file.read_text())
    figures = {result["name"]: result for result in told["results"]}
    assert told["bench"] == "scheduler"
    assert {"cycle_ms/100x50", "cycle_ms/1000x200", "quiet_cycle_ms/1000x200", "freed_to_dispatch_ms/p95"} <= set(figures)
    assert {"submit_to_start_s/p95", "submit_to_start_s/engine", "attempts_per_s", "process_start_share"} <= set(figures)
    assert figures["attempts_lost"]["median"] == 0
    assert figures["attempts_doubled"]["median"] == 0
    legs = [figure["median"] for name, figure in figures.items() if name.startswith("submit_to_start_s/") and "p95" not in name]
    assert all(leg > 0 for leg in legs), "the legs follow each other"
    assert figures["placed_a_cycle/1000x200"]["median"] > 1, "a bench of cycles that place nothing would say little"
