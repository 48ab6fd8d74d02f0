"""Events and messages: strict, lossless for every float, numbered from 1."""

from __future__ import annotations

import inspect
import json
import math
import struct
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from oppo_contract import events, wire
from oppo_contract.events import Event, StepEvent, WireModel, parse_event

ENVELOPE = {"producer": "engine", "seq": 1, "time": 1.5}
EXAMPLES: dict[str, dict[str, Any]] = {
    "started": {"devices": ["cpu:0"], "lanes": [["cpu:0", "actor"]], "start_step": 0, "total_steps": 2},
    "step": {"step": 1, "elapsed_s": 0.5, "generated_tokens": 9, "device_seconds": 0.5, "metrics": {"critic/score/mean": 1.0}},
    "spans": {
        "step": 1, "window_s": [0.0, 1.0], "device": ["cpu:0"], "role": ["actor"], "phase": ["decode"],
        "start_s": [0.0], "end_s": [0.5], "chunk": [1], "rows": [4], "idle": [["cpu:0", "tail", 0.5, 1.0]],
        "deferred": [{"sequence_id": 3, "age": 1, "tokens": 8, "start_s": 0.0, "end_s": 0.5, "trained": False}],
    },
    "decision": {"step": 1, "controller": "overcommit", "old": 4, "new": 5, "reason": "reward rises"},
    "samples": {
        "step": 1,
        "samples": [
            {"sequence_id": 1, "prompt": "p", "response": "r", "stale_response": "", "score": 0.5, "kl": 0.1,
             "length": 1, "age": 0, "versions": [0, 1]}
        ],
    },
    "checkpoint": {"step": 1, "folder": "checkpoints/step-00000001", "manifest_sha256": "0" * 64, "bytes": 12},
    "log": {"stream": "stderr", "lines": ["a line"]},
    "left_out": {"from_step": 3, "to_step": 9, "timelines": 7, "answers": 14, "lines": 0},
    "finished": {"outcome": "succeeded", "step": 2, "reason": "all steps done"},
}  # fmt: skip


def line(kind: str, **changes: Any) -> str:
    """One event as its outbox line."""
    return json.dumps(ENVELOPE | {"kind": kind} | EXAMPLES[kind] | changes)


def messages() -> list[type[WireModel]]:
    """Every model of the wire format."""
    found = [*vars(events).values(), *vars(wire).values()]
    return sorted({m for m in found if inspect.isclass(m) and issubclass(m, WireModel)}, key=lambda m: m.__name__)


def test_there_is_an_example_of_every_event() -> None:
    union, _ = get_args(Event)
    assert {kind.model_fields["kind"].default for kind in get_args(union)} == set(EXAMPLES)


def test_newer_timeline_fields_are_optional() -> None:
    older = parse_event(line("spans"))
    assert (older.flows, older.counters, older.trained) == ([], {}, [])
    newer = parse_event(line("spans", flows=[[0, 0]], counters={"live_rows": [[0.0, 4.0]]}, trained=[[3, 5, 8]]))
    assert (newer.flows, newer.counters, newer.trained) == ([(0, 0)], {"live_rows": [(0.0, 4.0)]}, [(3, 5, 8)])


@pytest.mark.parametrize("kind", EXAMPLES)
def test_event_round_trip_through_json(kind: str) -> None:
    event = parse_event(line(kind))
    assert event.kind == kind
    assert parse_event(event.model_dump_json()) == event
    assert "\n" not in event.model_dump_json()


@pytest.mark.parametrize("kind", EXAMPLES)
def test_an_unknown_key_is_refused(kind: str) -> None:
    with pytest.raises(ValidationError, match="extra_forbidden"):
        parse_event(line(kind, surprise=1))


@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.parametrize("key", ["producer", "seq", "time", "kind"])
def test_the_envelope_is_complete(kind: str, key: str) -> None:
    data = json.loads(line(kind))
    del data[key]
    with pytest.raises(ValidationError):
        parse_event(json.dumps(data))


@pytest.mark.parametrize("seq", [0, -1, 1.5, "x", None])
def test_numbers_start_at_one_and_are_whole(seq: object) -> None:
    with pytest.raises(ValidationError):
        parse_event(line("log", seq=seq))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("step", {"step": 0}),
        ("step", {"metrics": {"two words": 1.0}}),
        ("step", {"metrics": {"k" * 201: 1.0}}),
        ("step", {"metrics": {f"k{i}": 0.0 for i in range(events.MAX_METRICS_PER_STEP + 1)}}),
        ("step", {"generated_tokens": -1}),
        ("spans", {"phase": ["dreaming"]}),
        ("spans", {"role": ["director"]}),
        ("spans", {"idle": [["cpu:0", "tired", 0.0, 1.0]]}),
        ("spans", {"counters": {"sheep": [[0.0, 1.0]]}}),
        ("finished", {"outcome": "maybe"}),
        ("log", {"producer": "stranger"}),
        ("started", {"total_steps": 0}),
    ],
)
def test_invalid_values_are_rejected(kind: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        parse_event(line(kind, **changes))


@given(st.dictionaries(st.from_regex(r"[A-Za-z0-9_./:-]{1,40}", fullmatch=True), st.floats(), max_size=8))
@settings(deadline=None)
def test_every_float_survives_bit_for_bit_but_for_nan_payloads(metrics: dict[str, float]) -> None:
    event = StepEvent(
        producer="engine", seq=1, time=0.0, step=1, elapsed_s=0.0, generated_tokens=0, device_seconds=0.0, metrics=metrics
    )
    text = event.model_dump_json()
    assert json.loads(text, parse_constant=pytest.fail)  # JSON that any reader takes: no bare NaN or Infinity
    back = parse_event(text)
    assert isinstance(back, StepEvent)
    assert back.metrics.keys() == metrics.keys()
    for key, value in metrics.items():
        same = struct.pack("d", back.metrics[key]) == struct.pack("d", value)
        assert same or (math.isnan(value) and math.isnan(back.metrics[key]))


def test_non_finite_numbers_are_strings() -> None:
    event = parse_event(line("step", metrics={"a": "NaN", "b": "Infinity", "c": "-Infinity"}))
    assert json.loads(event.model_dump_json())["metrics"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.__name__)
def test_every_message_is_strict_frozen_and_explained(message: type[WireModel]) -> None:
    assert message.model_config["extra"] == "forbid"
    assert message.model_config["frozen"] is True
    assert message.__doc__


def test_a_batch_has_bounds() -> None:
    event = json.loads(line("log"))
    with pytest.raises(ValidationError):
        wire.EventBatch.model_validate({"producer": "engine", "events": []})
    with pytest.raises(ValidationError):
        wire.EventBatch.model_validate({"producer": "engine", "events": [event] * (wire.MAX_BATCH_EVENTS + 1)})
    assert len(wire.EventBatch.model_validate({"producer": "engine", "events": [event] * 2}).events) == 2
