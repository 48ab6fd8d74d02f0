"""A run and checkpoints of commit f5bbdf8 (tests/fixtures/f5bbdf8) are read, and resumed with the results of that engine."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oppo_contract.events import parse_event
from tests.engine.conftest import World

OLDER = Path(__file__).parents[2] / "fixtures" / "f5bbdf8"
BETWEEN, WITHIN = "step-00000002", "step-00000003-chunk-000002"
LEARNED = (
    "actor/pg_loss", "actor/entropy", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "critic/score/mean",
    "critic/advantages/max", "response_length/mean", "objective/kl",
)  # fmt: skip
TOLERANCE = {"rtol": 0.0, "atol": 1e-9}
# Settings that this version may not have any more, as a stored spec has them when they are switched on.
RETIRED_ON: dict[str, dict[str, Any]] = {
    "overlap": {"drafter": {"max_rows": 5, "tokens": 4, "match": 1}},
    "ppo": {"on_nonfinite": "rollback"},
}


def resume(out: Path, checkpoint: Path) -> list[Any]:
    """Train from a checkpoint to the end of the run; returns the events."""
    spec = json.loads((OLDER / "run" / "spec.json").read_text())
    del spec["overlap"]["drafter"]
    status, events = World(OLDER / "world").main(spec, out, "--resume-from", checkpoint, threads=2)
    assert status == 0, events[-1]
    return events


def read_events(file: Path) -> list[Any]:
    return [parse_event(line) for line in file.read_bytes().splitlines()]


def last_weights(out: Path) -> dict[str, torch.Tensor]:
    folder = out / "checkpoints" / "step-00000006"
    files = {"actor": folder / "actor" / "model.safetensors", "critic": folder / "critic.safetensors"}
    return {f"{role}.{name}": weight for role, file in files.items() for name, weight in load_file(file).items()}


def learned(events: list[Any]) -> dict[tuple[int, str], float]:
    steps = {event.step: event.metrics for event in events if event.kind == "step"}
    return {(step, name): metrics[name] for step, metrics in steps.items() for name in LEARNED}


def assert_as_then(out: Path, events: list[Any], first: int) -> None:
    """The weights and metrics that the engine of f5bbdf8 reached, from step `first` on, up to the order of sums."""
    weights, expected = last_weights(out), load_file(OLDER / "expected.safetensors")
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, **TOLERANCE)
    now = learned(events)
    then = {key: value for key, value in learned(read_events(OLDER / "run" / "events.jsonl")).items() if key[0] >= first}
    assert {key: now[key] for key in then} == pytest.approx(then, rel=0, abs=1e-9)


def test_every_event_of_the_run_is_read() -> None:
    events = read_events(OLDER / "run" / "events.jsonl")
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert {"started", "step", "samples", "decision", "spans", "checkpoint", "finished"} >= {event.kind for event in events}
    assert events[-1].outcome == "succeeded"


def test_a_checkpoint_between_steps_is_resumed_to_the_same_weights(tmp_path: Path) -> None:
    events = resume(tmp_path / "out", OLDER / "run" / "checkpoints" / BETWEEN)
    assert [event.start_step for event in events if event.kind == "started"] == [2]
    assert_as_then(tmp_path / "out", events, 3)


def test_a_checkpoint_within_a_step_is_resumed_to_equal_weights(tmp_path: Path) -> None:
    events = resume(tmp_path / "out", OLDER / "run" / "checkpoints" / WITHIN)
    assert [event.start_step for event in events if event.kind == "started"] == [3]
    assert_as_then(tmp_path / "out", events, 4)


def test_a_checkpoint_whose_spec_has_retired_settings_switched_on_is_resumed_without_them(tmp_path: Path) -> None:
    checkpoint = tmp_path / WITHIN
    shutil.copytree(OLDER / "run" / "checkpoints" / WITHIN, checkpoint)
    state = json.loads((checkpoint / "state.json").read_text())
    for section, settings in RETIRED_ON.items():
        state["spec"][section] |= settings
    text = json.dumps(state)
    (checkpoint / "state.json").write_text(text)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["state.json"] = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "bytes": len(text)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    events = resume(tmp_path / "out", checkpoint)
    assert_as_then(tmp_path / "out", events, 4)


def test_the_actor_of_a_checkpoint_is_exported(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "oppo_cli", "export", OLDER / "run" / "checkpoints" / BETWEEN, tmp_path / "actor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kept = load_file(OLDER / "run" / "checkpoints" / BETWEEN / "actor" / "model.safetensors")
    exported = load_file(tmp_path / "actor" / "model.safetensors")
    assert all(torch.equal(exported[name], weight) for name, weight in kept.items())
