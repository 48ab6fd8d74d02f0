"""Six minutes of faults, drawn by the session's seed: nothing is lost (bench/chaos.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE")  # the tests' own settings and servers


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_nothing_is_lost_whatever_fails(tmp_path: Path) -> None:
    seed, file = os.environ.get("OPPO_TEST_SEED") or "1", tmp_path / "chaos.json"
    environ = {name: value for name, value in os.environ.items() if name not in OTHERS}
    command = [sys.executable, "bench/chaos.py", "--seed", seed, "--minutes", "6", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {result["name"]: result["median"] for result in json.loads(file.read_text())["results"]}
    assert figures["chaos/faults"] > 10
    assert figures["chaos/runs"] >= 6, "every shape of run at least once, however slow the machine"
