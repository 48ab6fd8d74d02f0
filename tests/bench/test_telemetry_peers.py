"""`oppo bench telemetry --peers`: what can be tested without the peers, which live in environments of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oppo_bench.telemetry.peer_trackers.tracker import Server, TrackerError
from oppo_bench.telemetry.peers import to_results


def test_ratios_are_taken_repetition_by_repetition() -> None:
    times = {
        "compare_ms": {"OPPO": [10.0, 20.0], "MLflow": [40.0, 20.0]},
        "spikes_shown": {"OPPO": [5.0], "MLflow": [0.0]},
    }
    named = {result.name: result for result in to_results(times)}
    assert (named["compare_ms/MLflow"].unit, named["compare_ms/MLflow"].median) == ("ms", 30.0)
    better = named["compare_ms/MLflow/ours_times_better"]
    assert (better.unit, better.min, better.max) == ("ratio", 1.0, 4.0)
    assert named["spikes_shown/OPPO"].median == 5.0
    assert "spikes_shown/MLflow/ours_times_better" not in named


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such option')"]
    server = Server("MLflow", command, "http://127.0.0.1:1", tmp_path, {})
    with pytest.raises(TrackerError, match=r"(?s)its start did not happen.*no such option") as error:
        server.wait_for(lambda: False, "its start")
    assert "MLflow" in str(error.value)
    server.close()
