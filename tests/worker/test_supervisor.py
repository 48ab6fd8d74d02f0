"""The supervisor with a platform that fails at chosen moments and an engine that misbehaves."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from oppo_contract.events import FinishedEvent
from worker.engine_process import is_for_engine
from worker.folders import EngineEnd
from worker.outbox import punch
from worker.outcomes import build_outcome


def steps_of(attempt: Any) -> list[int]:
    return [event["step"] for event in attempt.kinds("step")]


def test_attempt_from_claim_to_outcome(bench) -> None:
    attempt = bench.attempt(steps=25, checkpoint_every=10, say=1)
    assert bench.supervise().wait() == 0
    assert attempt.outcome["outcome"] == "succeeded"
    assert attempt.outcome["exit_code"] == 0
    assert attempt.device_was_free
    assert attempt.running
    assert steps_of(attempt) == list(range(1, 26))
    assert [checkpoint["step"] for checkpoint in attempt.checkpoints] == [10, 20]
    for checkpoint in attempt.checkpoints:
        assert checkpoint["url"].startswith(attempt.artifact_url + "/checkpoints/")
    said = [line for event in attempt.kinds("log", "supervisor") for line in event["lines"] if event["stream"] == "stdout"]
    assert said == [f"step {step} line 0" for step in range(1, 26)]
    assert not bench.folder.attempt(1).path.exists()


def test_engine_environment_has_no_platform_secrets() -> None:
    seen = ("OPPO_REWARD_HOSTS", "OPPO_REWARD_JUDGE", "OPPO_TRACKER_HOSTS", "HF_HOME", "PATH", "CUDA_VISIBLE_DEVICES")
    kept = ("OPPO_SECRET_KEY", "OPPO_JOIN_TOKEN", "OPPO_REWARDS", "DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE")
    assert [variable for variable in (*seen, *kept) if is_for_engine(variable)] == list(seen)


def test_secrets_reach_the_engine_and_are_redacted(bench) -> None:
    attempt = bench.attempt(blab="HF_TOKEN")
    attempt.secrets = {"HF_TOKEN": 'hf_"quoted"\\ünd more\nand a second line'}
    sent: list[str] = []
    bench.platform.before = lambda path, body: sent.append(json.dumps(body, ensure_ascii=False))
    assert bench.supervise().wait() == 0
    said = [line for event in attempt.kinds("log", "supervisor") for line in event["lines"]]
    assert "the token is [HF_TOKEN]!" in said
    assert "Bearer [HF_TOKEN]" in said
    assert attempt.kinds("log")[0]["lines"] == ["[HF_TOKEN]"]
    assert attempt.outcome["reason"] == "401 for [HF_TOKEN]"
    assert attempt.outcome["last_log_lines"] == ["Bearer [HF_TOKEN]"]
    for told in sent:
        assert "ünd more" not in told
        assert "second line" not in told


def test_a_duplicate_order_starts_no_second_engine(bench, tools) -> None:
    attempt = bench.attempt(steps=10_000, step_s=0.02)
    first = bench.supervise()
    tools.eventually(lambda: len(attempt.kinds("step")) > 2)
    assert bench.supervise().wait() == 0  # the lock is held
    assert bench.platform.requests.count("attempts/1/claim") == 1
    assert len(bench.engines()) == 1
    first.terminate()
    assert first.wait() == 0


def test_a_stale_order_is_dropped(bench) -> None:
    bench.attempt(steps=3)
    assert bench.supervise(epoch=5).wait() == 0
    assert not bench.folder.attempt(1).path.exists()
    assert not bench.engines()


def test_events_wait_on_disk_while_the_platform_is_away(bench, tools) -> None:
    attempt = bench.attempt(steps=60, step_s=0.02)
    process = bench.supervise()
    tools.eventually(lambda: len(attempt.kinds("step")) > 2)
    events = bench.folder.attempt(1).engine_events
    bench.away(until=lambda: b'"finished"' in events.read_bytes())
    assert process.wait() == 0
    assert steps_of(attempt) == list(range(1, 61))
    assert attempt.outcome["outcome"] == "succeeded"


def test_lost_response_applies_nothing_twice(bench) -> None:
    attempt = bench.attempt(steps=30, step_s=0.05)
    lost: list[str] = []

    def lose_every_third(path: str, _body: dict[str, Any]) -> str | None:
        if not path.endswith("/events"):
            return None
        lost.append(path)
        return "hang up" if len(lost) % 3 == 1 else None

    bench.platform.before = lose_every_third
    assert bench.supervise().wait() == 0
    assert len(lost) > 2
    assert steps_of(attempt) == list(range(1, 31))  # the platform asserts that no number comes twice


def test_events_are_resent_to_a_restored_platform(bench, tools) -> None:
    attempt = bench.attempt(steps=80, step_s=0.05)
    process = bench.supervise()
    tools.eventually(lambda: len(attempt.events["engine"]) > 10)
    with bench.platform.lock:  # restored from a backup, say
        del attempt.events["engine"][4:]
    assert process.wait() == 0
    assert steps_of(attempt) == list(range(1, 81))


def lose(attempt: Any, events: Path) -> None:
    """The platform loses all events after the fourth, as after a restore, and the disk the first six."""
    lines = events.read_bytes().splitlines(keepends=True)
    if not punch(events, len(b"".join(lines[:6]))):
        pytest.skip("this system gives no part of a file back")
    del attempt.events["engine"][4:]


LOST = "the platform requests event 5 of the engine, which is not on the node's disk; the first stored event is 7"


def test_attempt_ends_if_requested_events_are_gone(bench, tools) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.02)
    process = bench.supervise()
    tools.eventually(lambda: len(attempt.events["engine"]) > 10)
    with bench.platform.lock:
        lose(attempt, bench.folder.attempt(1).engine_events)
    assert process.wait() == 0
    assert (attempt.outcome["outcome"], attempt.outcome["reason"]) == ("node_failed", LOST)
    assert attempt.device_was_free
    assert len(attempt.events["engine"]) == 4, "nothing is told as if it came next"


def test_undeliverable_training_does_not_count(bench, tools) -> None:
    attempt = bench.attempt(steps=60, step_s=0.02)
    process = bench.supervise()
    tools.eventually(lambda: len(attempt.events["engine"]) > 10)
    events = bench.folder.attempt(1).engine_events
    bench.away(until=lambda: b'"finished"' in events.read_bytes() and not lose(attempt, events))
    assert process.wait() == 0
    assert (attempt.outcome["outcome"], attempt.outcome["reason"]) == ("node_failed", LOST)


@pytest.mark.parametrize(("wish", "outcome"), [("cancel", "cancelled"), ("pause", "paused"), (None, "node_failed")])
def test_signal_and_failure_take_precedence_over_lost_events(wish, outcome) -> None:
    event = {"producer": "engine", "seq": 9, "time": 0.0, "step": 3}
    stopped = FinishedEvent(**event, outcome="stopped", reason="asked to stop")
    told = build_outcome(1, EngineEnd(exit_code=0, signal=wish), stopped, [], LOST)
    assert (told.outcome, told.reason) == (outcome, LOST)
    failed = FinishedEvent(**event, outcome="failed", reason="the loss is not finite")
    told = build_outcome(1, EngineEnd(exit_code=1, signal=wish), failed, [], LOST)
    assert (told.outcome, told.reason) == ("failed", "the loss is not finite")


@pytest.mark.parametrize("status", [413, 422])
def test_rejected_event_is_replaced_and_the_rest_is_sent(bench, tools, status: int) -> None:
    attempt = bench.attempt(steps=20)

    def refuse_step_7(path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        bad = path.endswith("/events") and any(event.get("step") == 7 and event["kind"] == "step" for event in body["events"])
        return tools.problem(status) if bad else None

    bench.platform.before = refuse_step_7
    assert bench.supervise().wait() == 0
    assert steps_of(attempt) == [step for step in range(1, 21) if step != 7]
    assert any("was dropped" in line for event in attempt.kinds("log") for line in event["lines"])
    assert attempt.outcome["outcome"] == "succeeded"


def test_proxy_errors_do_not_end_the_attempt(bench, tools) -> None:
    attempt = bench.attempt(steps=40, step_s=0.02)
    stopped_for, begun = [404, 409], []

    def in_its_place(_path: str, _body: dict[str, Any]) -> tuple[int, Any] | None:
        begun.extend([True] if len(attempt.kinds("step")) > 3 else [])
        return (stopped_for.pop(), "404 page not found") if begun and stopped_for else None

    bench.platform.before = in_its_place
    process = bench.supervise()
    tools.eventually(lambda: not stopped_for, "the proxy to have said all")
    assert process.wait() == 0
    assert steps_of(attempt) == list(range(1, 41))
    assert attempt.outcome["outcome"] == "succeeded"


def test_many_large_events_arrive_in_batches_of_the_allowed_size(bench) -> None:
    attempt = bench.attempt(steps=120, step_s=0, bulk=480)
    assert bench.supervise().wait() == 0
    assert steps_of(attempt) == list(range(1, 121))
    assert attempt.outcome["outcome"] == "succeeded"


def test_crashed_engine_is_reported_with_its_last_log_lines(bench) -> None:
    attempt = bench.attempt(steps=20, die_at=5)
    assert bench.supervise().wait() == 0
    assert attempt.outcome["outcome"] == "engine_died"
    assert attempt.outcome["exit_code"] == 128 + signal.SIGSEGV
    assert attempt.outcome["last_log_lines"] == ["about to die"]
    assert steps_of(attempt) == [1, 2, 3, 4]


def test_sigterm_while_the_engine_starts_is_a_failure_of_the_node(bench) -> None:
    attempt = bench.attempt(sigterm_at_start=True)
    assert bench.supervise().wait() == 0
    assert attempt.outcome["outcome"] == "node_failed"
    assert attempt.outcome["reason"] == "SIGTERM stopped the engine while it started"


def test_a_spec_that_the_engine_refuses_fails_for_good(bench) -> None:
    attempt = bench.attempt(exit_code=2)
    assert bench.supervise().wait() == 0
    assert attempt.outcome["outcome"] == "failed"
    assert "no such model" in attempt.outcome["reason"]


@pytest.mark.parametrize(("wish", "outcome"), [("cancel", "cancelled"), ("pause", "paused"), ("preempt", "preempted")])
def test_signal_reaches_the_engine_with_a_heartbeat(bench, tools, wish: str, outcome: str) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.02)
    process = bench.supervise()
    tools.eventually(lambda: attempt.running)
    attempt.signal = wish
    assert process.wait() == 0
    assert attempt.outcome["outcome"] == outcome
    assert attempt.checkpoints
    assert attempt.device_was_free


@pytest.mark.parametrize(("wish", "outcome"), [("cancel", "cancelled"), pytest.param("pause", "paused", marks=pytest.mark.full)])
def test_a_stubborn_engine_is_killed_with_its_children_at_the_deadline(bench, tools, wish: str, outcome: str) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.02, ignore_sigterm=True, leave_child=True)
    process = bench.supervise()
    tools.eventually(lambda: attempt.running)
    attempt.signal, attempt.deadline_s = wish, 1.0
    assert process.wait() == 0
    assert attempt.outcome["outcome"] == outcome
    assert attempt.outcome["reason"] == "the engine did not stop before the deadline and was killed"
    assert attempt.device_was_free


def test_a_cancel_ends_what_a_pause_gave_time_to(bench, tools) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.02, ignore_sigterm=True)
    process = bench.supervise()
    tools.eventually(lambda: attempt.running)
    attempt.signal, attempt.deadline_s = "pause", 3600.0
    asked = "pause requested"
    tools.eventually(lambda: any(asked in line for event in attempt.kinds("log", "supervisor") for line in event["lines"]))
    attempt.signal, attempt.deadline_s = "cancel", 1.0
    assert process.wait() == 0
    assert attempt.outcome["outcome"] == "cancelled"


def test_orphaned_children_are_killed_before_the_outcome(bench) -> None:
    attempt = bench.attempt(steps=3, leave_child=True)
    assert bench.supervise().wait() == 0
    assert attempt.outcome["outcome"] == "succeeded"
    assert attempt.device_was_free


def test_the_engine_is_stopped_before_its_lease_can_end(bench, tools) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.02)
    bench.platform.lease_s = 6.0
    process = bench.supervise(OPPO_LEASE_MARGIN_S="2")
    tools.eventually(lambda: bench.engines())
    bench.away(until=lambda: not bench.engines())
    assert process.wait() == 0
    assert attempt.outcome["outcome"] == "preempted"  # no death: an outage uses up no attempt
    assert attempt.outcome["reason"] == "the platform could not be reached and the lease was about to expire"


def test_fenced_engine_is_stopped_and_its_events_are_sent(bench, tools) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.02)
    process = bench.supervise()
    tools.eventually(lambda: attempt.running)
    attempt.fenced = True
    assert process.wait() == 0
    assert not bench.engines()
    assert attempt.outcome is None
    assert steps_of(attempt) == list(range(1, len(steps_of(attempt)) + 1))


def test_a_killed_supervisor_takes_its_engine_along_and_the_next_one_reports(bench, tools) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.01, leave_child=True)
    process = bench.supervise()
    tools.eventually(lambda: len(attempt.kinds("step")) > 3)
    process.kill()
    process.wait()
    events = bench.folder.attempt(1).engine_events
    tools.eventually(lambda: not tools.engines_of(events))
    on_disk = events.read_bytes().count(b'"kind": "step"')
    assert bench.supervise().wait() == 0
    assert bench.platform.requests.count("attempts/1/claim") == 1
    assert len(steps_of(attempt)) == on_disk
    assert attempt.outcome["outcome"] == "node_failed"  # also when its engine was quick and saved before it went
    assert attempt.device_was_free
    assert not bench.folder.attempt(1).path.exists()


def test_a_shutdown_saves_and_requeues(bench, tools) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.02)
    process = bench.supervise()
    tools.eventually(lambda: attempt.running)
    process.terminate()
    assert process.wait() == 0
    assert attempt.outcome["outcome"] == "preempted"
    assert attempt.checkpoints
