"""`oppo bench telemetry --peers`: what can be tested without the peers, which live in environments of their own."""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from playwright.sync_api import TimeoutError as NoChart

from oppo_bench.telemetry import peers
from oppo_bench.telemetry.peer_trackers.tracker import Server, TrackerError
from oppo_bench.telemetry.peers import to_results
from oppo_bench.telemetry.platform_backend import Ours


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


def test_a_page_that_draws_nothing_leaves_a_peer_out_and_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "browser", lambda: nullcontext(None))
    ours, theirs = Mock(spec=Ours), Mock()
    ours.name, theirs.name = "OPPO", "MLflow"
    times: peers.Times = defaultdict(lambda: defaultdict(list))
    opened = []

    def measure(_: object, tracker: Any, __: object) -> dict[str, float]:
        opened.append(tracker.name)
        if tracker is theirs:
            raise NoChart("no chart")
        return {"screen_s": 2.0}

    assert peers._browse([ours, theirs], "screen", measure, 2, times, lambda _: None) == ["OPPO"]
    assert opened == ["OPPO", "MLflow", "OPPO", "OPPO"]
    assert times == {"screen_s": {"OPPO": [2.0, 2.0]}}  # the first one warms up
    with pytest.raises(NoChart):
        peers._browse([ours], "screen", Mock(side_effect=NoChart("no chart")), 2, times, lambda _: None)


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such option')"]
    server = Server("MLflow", command, "http://127.0.0.1:1", tmp_path, {})
    with pytest.raises(TrackerError, match=r"(?s)its start did not happen.*no such option") as error:
        server.wait_for(lambda: False, "its start")
    assert "MLflow" in str(error.value)
    server.close()
