"""Costs are found again in what virtual devices recorded, and a real run's time is found again by replaying it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oppo_contract.events import EVENT_ADAPTER
from oppo_contract.spec import RunSpec
from oppo_core.engine.state import Engine
from oppo_core.simulation.assemble import MemoryJournal, assemble, steps_of
from oppo_core.simulation.counterfactual import Change, changes, check, counterfactuals
from oppo_core.simulation.fit_costs import cost_at, fit, nonnegative_least_squares, with_cost
from oppo_core.simulation.lengths import recorded_lengths
from oppo_core.simulation.recording import RecordingError, read_recording
from oppo_core.simulation.replay import build_replay, run, simulated_spans, unfinished
from oppo_estimate.devices import Devices
from oppo_estimate.schedules import Target

ROOT = Path(__file__).resolve().parents[2]
# A tiny run on a busy machine: its replay may be off by this share. On a quiet one it is off by 3 % (docs/simulation.md).
GENEROUS = 0.35
COSTS = {
    "costs.decode.round_us": 9000.0, "costs.decode.row_us": 700.0, "costs.decode.cached_token_us": 11.0,
    "costs.actor.pass_us": 3000.0, "costs.actor.token_us": 310.0, "costs.actor.backward_us": 640.0,
    "costs.actor.optimizer_us": 21000.0, "costs.reward.token_us": 210.0, "costs.reward.pass_us": 1000.0,
    "costs.reference.token_us": 190.0, "costs.critic.token_us": 230.0, "costs.critic.backward_us": 470.0,
    "overheads.score_us": 800.0, "overheads.advantage_us": 40.0, "overheads.prompt_us": 900.0,
}  # fmt: skip
LENGTHS = [3, 17, 5, 40, 9, 2, 28, 11, 6, 33, 14, 7, 21]
OVERLAPS: dict[str, dict[str, Any]] = {
    "sequential": {}, "both": {"intra_step": "per_chunk", "inter_step": "defer", "chunk": {"size": 4}},
}  # fmt: skip


def cpu_devices() -> Devices:
    """Two cores, as the engine lays itself out on them, with costs unlike one another."""
    from oppo_core.simulation.replay import DECODE_PARALLEL, PASS_PARALLEL

    place = dict.fromkeys(("reward", "reference", "critic"), "scorers")
    devices = Devices.model_validate({
        "name": "known", "kind": "cpu", "actor": 1, "groups": {"scorers": 1}, "place": place, "without_streaming": "share",
        "costs": {
            "decode": {"round_us": 1, "row_us": 1, "parallel": DECODE_PARALLEL},
            "actor": {"token_us": 1, "backward_us": 1, "parallel": PASS_PARALLEL},
            "reward": {"token_us": 1, "parallel": PASS_PARALLEL}, "reference": {"token_us": 1, "parallel": PASS_PARALLEL},
            "critic": {"token_us": 1, "backward_us": 1, "parallel": PASS_PARALLEL},
        },
    })  # fmt: skip
    for path, us in COSTS.items():
        devices = with_cost(devices, path, us)
    return devices


def write_recording(engine: Engine, folder: Path) -> Path:
    """What the simulated engine told, as a real one's events.jsonl and spec.json."""
    assert isinstance(engine.journal, MemoryJournal)
    folder.mkdir(exist_ok=True)
    lines = []
    for number, (kind, payload) in enumerate(engine.journal.events, start=1):
        envelope = {"kind": kind, "producer": "engine", "seq": number, "time": 0.0}
        lines.append(EVENT_ADAPTER.validate_python(envelope | payload).model_dump_json() + "\n")
    (folder / "events.jsonl").write_text("".join(lines))
    (folder / "spec.json").write_text(engine.spec.model_dump_json())
    return folder / "events.jsonl"


@pytest.fixture
def recorded(small: Callable[..., RunSpec], tmp_path: Path) -> Callable[[str], Path]:
    """Writes the events of twelve simulated steps in one of `OVERLAPS`."""

    def write(name: str) -> Path:
        spec = small({"steps": 12, "ppo": {"batch_size": 4}, "overlap": OVERLAPS[name]})
        engine = assemble(spec, cpu_devices(), lambda i: LENGTHS[i % len(LENGTHS)])
        list(steps_of(engine))
        return write_recording(engine, tmp_path)

    return write


@pytest.mark.parametrize("name", OVERLAPS)
def test_known_costs_are_found_again(name: str, recorded: Callable[[str], Path]) -> None:
    recording = read_recording(recorded(name))
    fitted = fit(recording)
    for path in ("costs.decode.round_us", "costs.decode.row_us", "costs.actor.token_us", "costs.actor.backward_us",
                 "costs.reward.token_us", "costs.critic.backward_us", "overheads.advantage_us"):  # fmt: skip
        assert cost_at(fitted.devices, path) == pytest.approx(COSTS[path], rel=0.01), path
    assert all(block.error < 0.01 for block in fitted.blocks if block.spans)
    checked = check(recording, fitted)
    assert abs(checked.error) < 0.002
    assert checked.step_error < 0.005


def test_answers_unfinished_at_the_end_of_a_recording_are_among_the_longer_ones(
    small: Callable[..., RunSpec], tmp_path: Path
) -> None:
    """Their lengths are unknown, but not shorter than what was decoded: the longest are deferred, so the rest would mislead."""
    spec = small({"steps": 12, "ppo": {"batch_size": 4}, "overlap": OVERLAPS["both"]})
    lengths = [3, 17, 5, 40, 9, 2, 28, 11, 6, 33, 14, 7, 90]
    engine = assemble(spec, cpu_devices(), lambda i: lengths[i % len(lengths)])
    list(steps_of(engine))
    left = {s.sequence_id: s.length for s in engine.pool.sequences}
    recording = read_recording(write_recording(engine, tmp_path))
    begun = unfinished(recording, fit(recording).devices)
    assert begun == left
    assert len(begun) == 1
    drawn, known = recorded_lengths(spec.seed, recording.lengths, 1000, begun), sorted(recording.lengths.values())
    for sequence_id, length in begun.items():
        assert drawn(sequence_id) > length
        assert drawn(sequence_id) in known
        assert recorded_lengths(spec.seed, recording.lengths, 1000)(sequence_id) == 1000, "it does not end in the recording"
        assert recorded_lengths(spec.seed, recording.lengths, 1000, {sequence_id: known[-1]})(sequence_id) == known[-1] + 1
    others = {drawn(sequence_id) for sequence_id in range(1000, 1200)}
    assert others == set(known), "a sequence that was not begun can have any length"


def test_the_other_schedules_are_told_as_if_they_had_been_run(
    recorded: Callable[[str], Path], small: Callable[..., RunSpec]
) -> None:
    """Fitted to the sequential run alone, the time of the overlapped one is nearly the time that it really takes.

    Nearly, because it answers two prompts that the sequential run never reached, and nobody knows how long those answers are.
    """
    recording = read_recording(recorded("sequential"))
    told = {row.schedule: row for row in counterfactuals(recording, fit(recording), Target(12), changes([1]))}
    spec = small({"steps": 12, "ppo": {"batch_size": 4}, "overlap": OVERLAPS["both"] | {"chunk": {"size": 2}}})
    real = list(steps_of(assemble(spec, cpu_devices(), lambda i: LENGTHS[i % len(LENGTHS)])))[3:]
    assert told["both, Δ = 1"].step_s == pytest.approx(sum(step["timing_s/step"] for step in real) / len(real), rel=0.05)
    assert told["sequential"].speedup == pytest.approx(1)
    assert told["both, Δ = 1"].speedup > 1


def test_another_batch_size_or_number_of_devices_takes_what_such_a_run_takes(
    recorded: Callable[[str], Path], small: Callable[..., RunSpec]
) -> None:
    recording = read_recording(recorded("both"))
    rows = {row.schedule: row for row in counterfactuals(recording, fit(recording), Target(12), changes((), [3], [1, 2, 4]))}
    smaller = {"steps": 12, "ppo": {"batch_size": 3}, "overlap": OVERLAPS["both"] | {"chunk": {"size": 4}}}
    real = list(steps_of(assemble(small(smaller), cpu_devices(), lambda i: LENGTHS[i % len(LENGTHS)])))[3:]
    step_s = sum(step["timing_s/step"] for step in real) / len(real)
    assert rows["as recorded, B = 3"].step_s == pytest.approx(step_s, rel=0.1)
    assert rows["as recorded, devices: 2"].step_s == pytest.approx(rows["both"].step_s)
    assert rows["as recorded, devices: 4"].step_s < rows["both"].step_s < rows["as recorded, devices: 1"].step_s
    [impossible] = counterfactuals(recording, fit(recording), Target(12), [Change("B = 1", batch_size=1)])
    assert impossible.problem is not None, "Δ is larger than B"
    assert "overcommit" in impossible.problem


def test_a_cost_that_does_nothing_and_one_that_would_be_negative_are_zero() -> None:
    import numpy as np

    rounds, rows = np.array([1.0, 2.0, 3.0]), np.array([5.0, 1.0, 2.0])
    assert nonnegative_least_squares([rounds, rows, np.zeros(3)], 2 * rounds + 3 * rows) == pytest.approx([2, 3, 0])
    assert nonnegative_least_squares([rounds, rows], 2 * rounds - rows)[1] == 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: [line for line in lines if '"step":1,' not in line], "lacks step 1"),
        (lambda lines: [line for line in lines if '"spans"' not in line], "logging.spans_every"),
        (lambda lines: lines[:1], "no complete step"),
        (lambda lines: ["{}\n", *lines], "line 1, is not an event"),
    ],
)
def test_unsupported_recording_is_refused(change: Any, complaint: str, recorded: Callable[[str], Path]) -> None:
    file = recorded("sequential")
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))
    with pytest.raises(RecordingError, match=complaint):
        read_recording(file)


def test_without_its_spec_a_run_is_refused(recorded: Callable[[str], Path]) -> None:
    file = recorded("sequential")
    (file.parent / "spec.json").unlink()
    with pytest.raises(RecordingError, match="spec is not beside"):
        read_recording(file)


def test_one_of_several_ranks_is_refused(recorded: Callable[[str], Path], small: Callable[..., RunSpec]) -> None:
    several = small({"ppo": {"batch_size": 4}, "resources": {"kind": "cpu", "processes": 2}})
    with pytest.raises(RecordingError, match="is from one of 2 ranks"):
        read_recording(recorded("sequential"), several)


@pytest.mark.parametrize(
    ("name", "passes"), [("sequential", 1), ("both", 1), pytest.param("sequential", 0, marks=pytest.mark.full), ("both", 0)]
)
def test_a_real_run_has_the_spans_of_its_replay_and_takes_as_long(name: str, passes: int, tmp_path: Path) -> None:
    """`passes`: training.retained_passes. A span that only one of them has would be fitted to the work of another."""
    tiny = {"tiny": {"hidden": 32, "layers": 2, "heads": 2, "context": 160, "vocab": 64}}
    spec = {
        "name": "real", "steps": 8, "models": {"actor": tiny, "reward": {"model": tiny}}, "data": {"prompts": "prompts.jsonl"},
        "ppo": {"batch_size": 6}, "rollout": {"max_new_tokens": 96, "max_prompt_tokens": 16}, "logging": {"samples_per_step": 0},
        "training": {"retained_passes": passes},
        "overlap": {"intra_step": "off", "inter_step": "off", "overcommit": {"initial": 3, "max": 4}, **OVERLAPS[name]},
    }  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(8)))
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "oppo_core", "--spec", "spec.json", "--out", "out", "--events", "events.jsonl"]
    paths = os.pathsep.join([str(ROOT / "platform"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--threads", "2"], cwd=tmp_path, env=environment, check=True, timeout=120)
    recording = read_recording(tmp_path / "events.jsonl")
    fitted = fit(recording)
    engine = build_replay(recording, fitted.devices)
    list(run(engine, recording, follow=True))
    replayed, spans = simulated_spans(engine), {key for step in recording.steps for key in step.spans}
    for role in ("critic", "reference", "reward"):
        assert {key for key in replayed if key[1] == role} == {key for key in spans if key[1] == role}, role
    checked = check(recording, fitted)
    assert abs(checked.error) < GENEROUS, f"{checked.replayed_s:.3f} s replayed, {checked.recorded_s:.3f} s recorded"
