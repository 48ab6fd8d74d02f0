"""Every way to overlap leaves a timeline that explains itself: time is accounted for, hand-overs and counters fit the spans."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from oppo_contract.chrome_trace import chrome_trace
from oppo_contract.events import SpansEvent, StepEvent

# Enough work a step that the interpreter's own time between two stages does not count.
WORK: dict[str, Any] = {
    "steps": 6, "ppo": {"batch_size": 12, "micro_batch_tokens": 4000}, "checkpoints": {"every_steps": 3},
    "resources": {"dtype": "float32"}, "overlap": {"overcommit": {"initial": 4, "max": 6}}, "logging": {"samples_per_step": 0},
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "sequential": {"intra_step": "off", "inter_step": "off"},
    "per-sequence": {"intra_step": "per_sequence", "inter_step": "off"},
    "intra": {"intra_step": "per_chunk", "inter_step": "off"},
    "inter": {"intra_step": "off", "inter_step": "defer"},
    "both": {"intra_step": "per_chunk", "inter_step": "defer"},
    "update overlap": {"intra_step": "per_chunk", "inter_step": "defer", "update_overlap": True},
}
UNKNOWN_MOST = 0.02


@pytest.fixture(scope="module", params=MODES)
def run(request: pytest.FixtureRequest, world: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two cores in one of the modes; look only."""
    changes = {"overlap": MODES[request.param]}
    return world.run(world.spec(WORK, changes), tmp_path_factory.mktemp("mode"), threads=2)


def timelines(run: Any) -> list[SpansEvent]:
    return [event for event in run.events if isinstance(event, SpansEvent)]


def test_every_idle_second_has_a_cause(run: Any) -> None:
    """Busy and idle make up the window of every step; from the second on, half of the steps leave at most 2 % unexplained."""
    steps = [event for event in run.events if isinstance(event, StepEvent)]
    for device in run.engine.layout.devices:
        shares = []
        for metrics in (step.metrics for step in steps):
            window = metrics["timing_s/step"]
            idle = {key.rsplit("/", 1)[1]: s for key, s in metrics.items() if key.startswith(f"idle_s/{device}/")}
            assert metrics[f"busy/{device}"] * window + sum(idle.values()) == pytest.approx(window)
            shares.append(idle["unknown"] / window)
        assert median(shares[1:]) <= UNKNOWN_MOST, [f"{share:.1%}" for share in shares]


def test_each_chunk_that_was_read_came_from_the_span_that_decoded_it(run: Any) -> None:
    for event in timelines(run):
        read = [i for i, phase in enumerate(event.phase) if event.chunk[i] and phase.endswith("-prefill")]
        assert sorted(reader for _, reader in event.flows) == read, "one arrow for every reading of a chunk"
        for writer, reader in event.flows:
            assert event.phase[writer] == "decode"
            assert event.chunk[writer] == event.chunk[reader]
            assert event.start_s[writer] <= event.start_s[reader]
            assert event.device[writer] != event.device[reader], "what is in the same process is not handed over"
    assert any(event.flows for event in timelines(run)) == run.engine.layout.streams


def test_counters_fit_the_spans(run: Any) -> None:
    for event in timelines(run):
        for samples in event.counters.values():
            assert all(one[0] <= other[0] for one, other in pairwise(samples))
            assert all(event.window_s[0] - 1e-5 <= t <= event.window_s[1] + 1e-5 for t, _ in samples)
        rows = [event.rows[i] for i, phase in enumerate(event.phase) if phase == "decode" and event.device[i] == "cpu:0"]
        assert [value for _, value in event.counters["live_rows"]] == [*rows, 0] if rows else []
        waiting = [value for _, value in event.counters["waiting_handovers"]]
        assert all(value >= 0 for value in waiting)
        assert waiting[-1:] in ([], [0])
        finished = [value for _, value in event.counters["finished"]]
        assert finished == list(range(len(finished)))


def test_its_trace_file_holds_what_the_events_hold(run: Any) -> None:
    drawn = json.loads(json.dumps(chrome_trace(run.events)))["traceEvents"]
    work = [e for e in drawn if e["ph"] == "X" and e["cat"] in ("actor", "scorers")]
    told = [(e.phase[i], e.end_s[i] - e.start_s[i]) for e in timelines(run) for i in range(len(e.phase))]
    assert len(work) == len(told)
    assert sum(e["dur"] for e in work) == pytest.approx(1e6 * sum(seconds for _, seconds in told), abs=0.5 * len(told))
    arrows = [e for e in drawn if e["ph"] == "s" and e["name"].startswith("chunk")]
    assert len(arrows) <= sum(len(e.flows) for e in timelines(run)), "a span of less than a microsecond has no place for one"
