"""A full outbox: details are dropped and reported, nothing else is lost, and the engine never waits."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oppo_contract.events import EVENT_ADAPTER, FULL_SUFFIX, CheckpointEvent, DroppedEvent, Event, parse_event
from oppo_contract.wire import Claimed, EventBatch
from oppo_core.reporting.event_log import REPORT_EVERY, Journal
from worker import outbox_limit, uploader
from worker.folders import AttemptFolder, SavedClaim
from worker.logs import LogTail
from worker.outbox import OutboxWriter
from worker.outbox_limit import MAX_BYTES, MIN_FREE, OutboxLimit
from worker.platform_api import Unreachable
from worker.redaction import Redactor
from worker.uploader import Uploader

ANSWER = {"sequence_id": 1, "prompt": "p" * 200, "response": "r", "stale_response": "", "score": 0.5, "kl": 0.1, "length": 1,
          "age": 0, "versions": (0, 0)}  # fmt: skip
SPANS: dict[str, Any] = {"window_s": (0.0, 1.0), "device": ["cpu:0"], "role": ["actor"], "phase": ["decode"], "start_s": [0.0],
                         "end_s": [0.5], "chunk": [1], "rows": [4], "idle": [], "deferred": []}  # fmt: skip


def tell_step(journal: Journal, step: int, lines: int = 1) -> None:
    """Events of a step."""
    times = {"elapsed_s": float(step), "generated_tokens": step, "device_seconds": 1.0}
    journal.write("step", step=step, metrics={"m": float(step)}, **times)
    journal.write("spans", step=step, **SPANS)
    journal.write("samples", step=step, samples=[ANSWER] * 2)
    if lines:
        journal.write("log", stream="stdout", lines=["a line"] * lines)


def assert_conserved(events: list[Event], steps: int, lines: int) -> list[DroppedEvent]:
    """Every missing event is a reported detail. Returns the reports."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    kept: dict[str, list[Any]] = {}
    for event in events:
        kept.setdefault(event.kind, []).append(event)
    told = kept.get("left_out", [])
    assert [event.step for event in kept["step"]] == list(range(1, steps + 1))
    assert len(kept.get("spans", [])) + sum(event.timelines for event in told) == steps
    assert sum(len(event.samples) for event in kept.get("samples", [])) + sum(event.answers for event in told) == 2 * steps
    assert sum(len(event.lines) for event in kept.get("log", [])) + sum(event.lines for event in told) == lines
    missing = set(range(1, steps + 1)) - {event.step for event in kept.get("spans", [])}
    assert all(any(event.from_step <= step <= event.to_step for event in told) for step in missing)
    return told


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(full=st.lists(st.booleans(), min_size=1, max_size=60), ends_well=st.booleans())
def test_dropped_details_are_counted_and_nothing_else_is_lost(
    tmp_path_factory: pytest.TempPathFactory, full: list[bool], ends_well: bool
) -> None:
    path = tmp_path_factory.mktemp("outbox") / "engine.jsonl"
    journal, flag = Journal(path), path.with_name(path.name + FULL_SUFFIX)
    for step, is_full in enumerate(full, start=1):
        flag.touch() if is_full else flag.unlink(missing_ok=True)
        tell_step(journal, step)
    if ends_well:
        journal.write("finished", outcome="succeeded", step=len(full), reason="all steps done")
    journal.close()
    events = [parse_event(line) for line in path.read_bytes().splitlines()]
    told = assert_conserved(events, len(full), len(full))
    assert bool(told) == any(full)
    if ends_well:
        assert events[-1].kind == "finished"


def test_drops_are_reported_at_once_and_then_periodically(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "e.jsonl")
    (tmp_path / ("e.jsonl" + FULL_SUFFIX)).touch()
    steps = 5 * REPORT_EVERY
    for step in range(1, steps + 1):
        tell_step(journal, step)
    events = [
        parse_event(line) for line in (tmp_path / "e.jsonl").read_bytes().splitlines()
    ]  # as it is when the engine is killed
    told = [event for event in events if isinstance(event, DroppedEvent)]
    assert (told[0].from_step, told[0].to_step, told[0].timelines) == (1, 1, 1)
    assert len(told) == 5
    assert told[-1].to_step > steps - REPORT_EVERY
    assert told[1].summary().endswith("20 log lines were dropped. Metrics, decisions and checkpoints are complete.")


class Platform:
    """Accepts batches while it is reachable."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.events: dict[str, list[Event]] = {"engine": [], "supervisor": []}

    def send_events(self, _attempt_id: int, body: bytes) -> int:
        if not self.there.is_set():
            raise Unreachable("away")
        batch = EventBatch.model_validate_json(body)
        taken = self.events[batch.producer]
        taken += [event for event in batch.events if event.seq > len(taken)]
        return len(taken)


@pytest.fixture
def outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Platform, Uploader, AttemptFolder]:
    """An attempt with an unreachable platform and an outbox limit of 40,000 bytes."""
    monkeypatch.setenv(MAX_BYTES, "40000")
    monkeypatch.setattr(uploader, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(uploader, "MAX_WAIT_S", 0.02)
    monkeypatch.setattr(uploader, "LOG_INTERVAL_S", 0.01)
    folder = AttemptFolder(tmp_path / "17")
    folder.path.mkdir()
    claimed = Claimed(
        attempt_token="t", run_id=1, spec={}, device_indices=[0], lease_s=900, artifact_url=(tmp_path / "runs" / "1").as_uri()
    )
    platform = Platform()
    carries = Uploader(folder, SavedClaim(epoch=1, claimed=claimed), platform, on_started=lambda: None)  # type: ignore[arg-type]
    return platform, carries, folder


def test_long_outage_drops_only_details(outage: tuple[Platform, Uploader, AttemptFolder], tools: Any) -> None:
    platform, carries, folder = outage
    thread = threading.Thread(target=carries.run, daemon=True)
    thread.start()
    journal, step = Journal(folder.engine_events), 0
    while not folder.full_file.exists():
        step += 1
        tell_step(journal, step)
        assert step < 10_000
    for _ in range(30):
        step += 1
        tell_step(journal, step)
    folder.log_file("stdout").write_text("".join(f"said {n}\n" for n in range(50)))
    tails = folder.path / "tails.json"
    tools.eventually(lambda: tails.exists() and '"left_out": 50' in tails.read_text(), "the log to be counted")
    platform.there.set()
    tools.eventually(lambda: not folder.full_file.exists(), "room in the outbox")
    for _ in range(5):
        step += 1
        tell_step(journal, step)
    journal.write("finished", outcome="succeeded", step=step, reason="all steps done")
    journal.close()
    carries.close()
    assert carries.complete.wait(60)
    told = assert_conserved(platform.events["engine"], step, step)
    assert sum(event.timelines for event in told) >= 30
    assert {event.step for event in platform.events["engine"] if event.kind == "spans"} >= set(range(step - 4, step + 1))
    assert platform.events["engine"][-1].kind == "finished"
    said = [line for event in platform.events["supervisor"] for line in event.lines]  # type: ignore[union-attr]
    assert sum("the outbox is full" in line for line in said) == sum("has space again" in line for line in said) == 1
    assert "… 50 lines were dropped because the outbox was full" in said


def test_full_outbox_survives_a_supervisor_restart(outage: tuple[Platform, Uploader, AttemptFolder]) -> None:
    _, carries, folder = outage
    journal = Journal(folder.engine_events)
    for step in range(1, 200):
        tell_step(journal, step)
    carries._update_limit()
    assert carries.limit.full
    claim = carries.claim
    again = Uploader(folder, claim, carries.api, on_started=lambda: None)
    assert again.limit.full
    again._update_limit()
    assert folder.full_file.exists()


def test_disk_errors_do_not_stop_the_upload(
    outage: tuple[Platform, Uploader, AttemptFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    platform, carries, folder = outage

    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("pin_for_others", "pin"):
        monkeypatch.setattr(carries.pins, name, fails)
    monkeypatch.setattr(carries._tail, "follow", fails)
    monkeypatch.setattr(carries.limit, "update", fails)
    journal = Journal(folder.engine_events)
    for step in range(1, 20):
        tell_step(journal, step)
    journal.close()
    platform.there.set()
    carries.close()
    carries.run()
    assert carries.complete.is_set()
    assert_conserved(platform.events["engine"], 19, 19)


def test_space_is_not_freed_before_checkpoints_are_registered(
    outage: tuple[Platform, Uploader, AttemptFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, carries, _ = outage
    freed: list[object] = []
    monkeypatch.setattr(carries._engine, "free", lambda *given: freed.append(given))
    told = {"seq": 1, "time": 0, "step": 1, "folder": "f", "manifest_sha256": "a" * 64, "bytes": 1}
    carries._unregistered.append(CheckpointEvent(producer="engine", **told))  # type: ignore[arg-type]
    carries._update_limit()
    assert freed == []
    carries._unregistered.clear()
    carries._update_limit()
    assert len(freed) == 1


def test_dropped_lines_are_reported_at_the_end(tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path / "1")
    folder.path.mkdir()
    folder.log_file("stdout").write_text("one\ntwo\n")
    LogTail(folder, OutboxWriter(folder.supervisor_events), Redactor({})).follow(full=True)
    folder.log_file("stdout").open("a").write("three")
    LogTail(folder, OutboxWriter(folder.supervisor_events), Redactor({})).follow(ended=True, full=True)
    events = [EVENT_ADAPTER.validate_json(line) for line in folder.supervisor_events.read_bytes().splitlines()]
    assert [event.lines for event in events] == [["… 3 lines were dropped because the outbox was full"]]  # type: ignore[union-attr]


@pytest.mark.parametrize(("given", "least"), [("1000", 1000), (None, 256 * 2**20)])
def test_low_disk_space_drops_details(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, least: int) -> None:
    monkeypatch.delenv(MIN_FREE, raising=False)
    if given is not None:
        monkeypatch.setenv(MIN_FREE, given)
    free = [5 * least, least - 1, least * 3 // 2, 2 * least - 1, 2 * least]
    monkeypatch.setattr(outbox_limit.shutil, "disk_usage", lambda _path: SimpleNamespace(free=free.pop(0)))
    flag = tmp_path / "engine.jsonl.full"
    watched = OutboxLimit(flag)
    said = [(watched.update(0), flag.exists()) for _ in range(5)]
    why = f"{least - 1:,} bytes are free on its disk"
    assert said[1] == (f"the outbox is full, {why}: timelines, samples and log lines are dropped", True)
    assert said[4] == ("the outbox has space again: all events are recorded", False)
    assert [each for each in said if each[0]] == [said[1], said[4]]
