"""The Chrome trace of a run keeps the format's rules, so that viewers draw it, and holds exactly what the events hold."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_cli.main import main
from oppo_contract.chrome_trace import IDLE_COLOURS, chrome_trace
from oppo_contract.events import DecisionEvent, Event, IdleCause, LogEvent, Phase, Role, SpansEvent, StartedEvent

Json = dict[str, Any]
LANES = [("cpu:0", "actor"), ("cpu:1", "reward"), ("cpu:1", "reference"), ("cpu:1", "critic")]
KINDS = {"X", "C", "i", "s", "f", "M"}


def check_format(trace: Json) -> None:
    """The rules of the Chrome Trace Event format, as far as a viewer depends on them."""
    events = json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]
    assert {event["ph"] for event in events} <= KINDS
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        assert ("dur" in event) == (event["ph"] == "X")
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    check_names(events)
    check_nesting(events)
    check_flows(events)


def check_names(events: list[Json]) -> None:
    """Every process and thread that is drawn on has one name."""
    processes = Counter(e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name")
    threads = Counter((e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name")
    assert set(processes.values()) | set(threads.values()) <= {1}
    assert {e["pid"] for e in events if e["ph"] == "X"} == set(processes)
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == set(threads)


def check_nesting(events: list[Json]) -> None:
    """Two slices of one thread are apart, or one encloses the other."""
    open_ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in (e for e in events if e["ph"] == "X"):
        ends = open_ends[event["pid"], event["tid"]]
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1]
        ends.append(event["ts"] + event["dur"])


def check_flows(events: list[Json]) -> None:
    """Every arrow starts once and then ends once, each time inside a slice of its thread."""
    slices = defaultdict(list)
    for event in (e for e in events if e["ph"] == "X"):
        slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    starts: dict[int, Json] = {}
    ended = set()
    for event in (e for e in events if e["ph"] in "sf"):
        assert any(a <= event["ts"] < b for a, b in slices[event["pid"], event["tid"]])
        if event["ph"] == "s":
            assert event["id"] not in starts
            starts[event["id"]] = event
        else:
            assert event["bp"] == "e"
            assert event["id"] not in ended
            ended.add(event["id"])
            assert starts[event["id"]]["ts"] <= event["ts"]
            assert starts[event["id"]]["name"] == event["name"]
    assert ended == set(starts)


def started(time: float = 0.0, step: int = 0) -> StartedEvent:
    return StartedEvent(
        producer="engine", seq=1, time=time, devices=["cpu:0", "cpu:1"], lanes=LANES, start_step=step, total_steps=9
    )


MICROSECONDS = st.integers(0, 400)


def times_of(start_us: int, length_us: int) -> Json:
    return {"start_s": start_us / 1e6, "end_s": (start_us + length_us) / 1e6}


@st.composite
def steps(draw: st.DrawFn) -> SpansEvent:
    """A step's timeline with spans that lie, touch and overlap anyhow within a window of 1 ms."""
    number = draw(st.integers(1, 9))
    origin = number * 1000
    spans = sorted(draw(st.lists(st.tuples(MICROSECONDS, MICROSECONDS, st.sampled_from(get_args(Phase))), max_size=12)))
    times = [((origin + a) / 1e6, (origin + a + n) / 1e6) for a, n, _ in spans]
    later = st.sampled_from(range(len(spans))) if spans else st.nothing()
    flows = sorted({(min(pair), max(pair)) for pair in draw(st.lists(st.tuples(later, later), max_size=5))}) if spans else []
    idle = [("cpu:1", draw(st.sampled_from(get_args(IdleCause))), origin / 1e6, (origin + 7) / 1e6)]
    deferred = [
        {"sequence_id": n, "age": 1, "tokens": 3, "trained": t, **times_of(origin, draw(MICROSECONDS))}
        for n, t in draw(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=5, unique_by=lambda row: row[0]))
    ]  # fmt: skip
    return SpansEvent(
        producer="engine", seq=2, time=1.0, step=number, window_s=(origin / 1e6, (origin + 999) / 1e6),
        device=draw(st.lists(st.sampled_from(["cpu:0", "cpu:1"]), min_size=len(spans), max_size=len(spans))),
        role=draw(st.lists(st.sampled_from(get_args(Role)), min_size=len(spans), max_size=len(spans))),
        phase=[phase for _, _, phase in spans], start_s=[a for a, _ in times], end_s=[b for _, b in times],
        chunk=[1] * len(spans), rows=[4] * len(spans), idle=idle, deferred=deferred, flows=flows,
        counters={"live_rows": [(origin / 1e6, 4.0), ((origin + 5) / 1e6, 0.0)]},
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    told=st.lists(steps(), max_size=4, unique_by=lambda event: event.step).map(lambda all_: sorted(all_, key=lambda e: e.step))
)
def test_any_spans_give_a_valid_and_complete_trace(told: list[SpansEvent]) -> None:
    trace = chrome_trace([started(), *told])
    check_format(trace)
    work = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] in ("actor", "scorers")]
    assert Counter((e["name"], e["ts"], e["dur"]) for e in work) == Counter(
        (phase, round(a * 1e6), round(b * 1e6) - round(a * 1e6))
        for event in told
        for phase, a, b in zip(event.phase, event.start_s, event.end_s, strict=True)
    )


def test_a_chunk_flows_from_the_actor_to_each_scorer_that_reads_it() -> None:
    event = SpansEvent(
        producer="engine", seq=2, time=1.0, step=1, window_s=(0.0, 1.0), device=["cpu:0", "cpu:1", "cpu:1"],
        role=["actor", "reward", "critic"], phase=["decode", "reward-prefill", "critic-prefill"], start_s=[0.0, 0.4, 0.6],
        end_s=[0.5, 0.6, 0.9], chunk=[1, 1, 1], rows=[3, 3, 3], idle=[("cpu:1", "decode", 0.0, 0.4)], deferred=[],
        flows=[(0, 1), (0, 2)], counters={"overcommit": [(0.0, 8.0)]},
    )  # fmt: skip
    trace = chrome_trace([started(), event])
    check_format(trace)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    arrows = [(names[e["pid"]], e["ph"], e["ts"]) for e in trace["traceEvents"] if e["ph"] in "sf"]
    # The scorer has begun before the actor's span, in which the chunk was sent, is over: no arrow points back in time.
    assert arrows == [("actor", "s", 400_000), ("scorers", "f", 400_000), ("actor", "s", 499_999), ("scorers", "f", 600_000)]
    bubble = next(e for e in trace["traceEvents"] if e.get("cat") == "bubbles")
    assert (bubble["args"]["cause"], bubble["cname"], bubble["dur"]) == ("decode", IDLE_COLOURS["decode"], 400_000)
    counted = next(e for e in trace["traceEvents"] if e["ph"] == "C")
    assert (counted["name"], counted["args"]) == ("overcommit", {"value": 8.0})


def test_every_cause_has_a_colour_of_its_own() -> None:
    assert set(IDLE_COLOURS) == set(get_args(IdleCause))
    assert len(set(IDLE_COLOURS.values())) == len(IDLE_COLOURS)


def test_decisions_stand_where_they_were_made_and_logs_are_not_drawn() -> None:
    decision = DecisionEvent(producer="engine", seq=2, time=12.5, step=3, controller="chunk", old=8, new=16, reason="faster")
    log = LogEvent(producer="supervisor", seq=1, time=11.0, stream="stderr", lines=["hello"])
    trace = chrome_trace([started(time=10.0), log, decision])
    check_format(trace)
    marks = [(e["ts"], e["name"]) for e in trace["traceEvents"] if e["ph"] == "i"]
    assert marks == [(0, "attempt 1"), (2_500_000, "chunk decision")]


def test_without_a_start_there_is_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="never started to train"):
        chrome_trace([])


@pytest.fixture(scope="module")
def resumed(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Stopped after three steps and resumed: two attempts in one file."""
    out = tmp_path_factory.mktemp("resumed")
    spec = world.spec({"steps": 6, "overlap": {"intra_step": "per_chunk", "inter_step": "defer"}})
    world.run(spec, out, threads=2, stop_after=3)
    return world.run(spec, out, threads=2, resume=out / "checkpoints" / "step-00000003")


def test_attempts_follow_each_other(resumed: Any) -> None:
    trace = chrome_trace(resumed.events)
    check_format(trace)
    drawn = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [e["args"]["step"] for e in drawn if e["cat"] == "run"] == [1, 2, 3, 4, 5, 6]
    limits = [(min(e["ts"] for e in part), max(e["ts"] + e["dur"] for e in part)) for part in by_attempt(drawn)]
    assert len(limits) == 2
    assert all(one[1] <= other[0] for one, other in pairwise(limits))


def test_a_clock_that_was_set_back_does_not_lay_attempts_over_each_other(resumed: Any) -> None:
    moved: list[Event] = []
    for event in resumed.events:
        late = isinstance(event, StartedEvent) and event.start_step == 3
        moved.append(event.model_copy(update={"time": 5.0}) if late else event)
    trace = chrome_trace(moved)
    check_format(trace)
    first, second = by_attempt([e for e in trace["traceEvents"] if e["ph"] == "X"])
    assert max(e["ts"] + e["dur"] for e in first) <= min(e["ts"] for e in second)


def by_attempt(drawn: list[Json]) -> list[list[Json]]:
    parts = defaultdict(list)
    for event in drawn:
        if "attempt" in event["args"]:
            parts[event["args"]["attempt"]].append(event)
    return [parts[number] for number in sorted(parts)]


def test_deferred_responses_are_joined_across_steps(oppo_run: Any) -> None:
    trace = chrome_trace(oppo_run.events)
    check_format(trace)
    told = [(e.step, d) for e in oppo_run.events if isinstance(e, SpansEvent) for d in e.deferred]
    pieces = Counter(d.sequence_id for _, d in told)
    drawn = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "deferred responses"]
    assert Counter(e["name"] for e in drawn) == Counter({f"response {i}": n for i, n in pieces.items()})
    arrows = [e for e in trace["traceEvents"] if e["ph"] == "s" and e["name"] == "deferred"]
    lengthy = {(step, d.sequence_id) for step, d in told if d.end_s - d.start_s >= 2e-6}
    assert len(arrows) == sum((step + 1, i) in lengthy for step, i in lengthy)


def test_all_of_it_lies_within_the_run(oppo_run: Any) -> None:
    trace = chrome_trace(oppo_run.events)["traceEvents"]
    windows = [e.window_s for e in oppo_run.events if isinstance(e, SpansEvent)]
    timed = [e for e in trace if e["ph"] in "XCsf"]
    assert min(e["ts"] for e in timed) >= round(windows[0][0] * 1e6) - 1
    assert max(e["ts"] + e.get("dur", 0) for e in timed) <= round(windows[-1][1] * 1e6) + 1


def test_the_command_writes_the_steps_that_were_asked_for(oppo_run: Any, tmp_path: Path) -> None:
    events = oppo_run.out / "events.jsonl"
    command = ["trace", str(events), "--out", str(tmp_path / "trace.json"), "--from-step", "3", "--to-step", "5"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_format(trace)
    assert {e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X"} == {3, 4, 5}
    assert "3 steps" in result.output


def test_the_command_reads_a_run_that_still_trains_and_names_a_broken_line(oppo_run: Any, tmp_path: Path) -> None:
    whole = (oppo_run.out / "events.jsonl").read_bytes()
    file = tmp_path / "events.jsonl"
    file.write_bytes(whole[:-20])  # the last line is still being written
    assert CliRunner().invoke(main, ["trace", str(file), "--out", str(tmp_path / "a.json")]).exit_code == 0
    file.write_bytes(whole.replace(b'"kind":"step"', b'"kind":"stop"', 1))
    result = CliRunner().invoke(main, ["trace", str(file), "--out", str(tmp_path / "b.json")])
    assert result.exit_code == 2
    assert "line 2 is not an event" in result.output
    assert not (tmp_path / "b.json").exists()
