"""Scorers that fall behind, hang, or lose their reward service: the run stalls, recovers, or ends with a clear error."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from oppo_contract.spec import RunSpec, load_spec
from oppo_core.rewards.service_auth import HOSTS_VARIABLE
from oppo_core.rollout.tokenizer import FileCodec
from oppo_core.scoring.process import QUEUE_SIZE, ScorerError
from oppo_core.scoring.scorers import SequenceDelta
from oppo_core.trace.recorder import Recorder
from oppo_core.train import train
from tests.engine.rewards.reward_server import Response, RewardServer, expected_score, score_response, serve_rewards
from tests.engine.rewards.rule_packages import install

pytestmark = pytest.mark.usefixtures("spawned_scorers")

PATIENCE_S = 60.0
SILENCE_S = 3.0
SLOW_RULE = """
import time

calls = 0

def hangs(prompt, response):
    global calls
    calls += 1
    while calls > 1:
        time.sleep(0.01)
    return 1.0
"""
STUCK_RULE = """
def hangs(prompt, response):
    while True:
        try:
            1 / 0
        except Exception:
            pass
"""
ENDLESS_RULE = """
import itertools

def adds(prompt, response):
    return sum(itertools.repeat(1))
"""


def rewarded(world: Any, reward: Any, *changes: Any) -> dict[str, Any]:
    """The world's spec as plain data with this `models.reward`."""
    tree: dict[str, Any] = world.tree({"steps": 5, "models": {"critic": "actor"}}, *changes)
    return tree | {"models": tree["models"] | {"reward": reward}}


def failure(world: Any, out: Path, tree: dict[str, Any], threads: int) -> str:
    """The reason in the last event of a failed run; checks that no process is left."""
    status, events = world.main(tree, out, threads=threads)
    assert status == 1
    assert (events[-1].kind, events[-1].outcome) == ("finished", "failed")
    assert [p for p in psutil.Process().children() if any("spawn_main" in word for word in p.cmdline())] == []
    return str(events[-1].reason)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    with serve_rewards() as listening:
        monkeypatch.setenv(HOSTS_VARIABLE, listening.place)
        yield listening


def http(server: RewardServer, **settings: Any) -> dict[str, Any]:
    return {"http": {"url": server.url, **settings}}


# ---- the queue -------------------------------------------------------------------------------------------------------


class Stopped:
    """Stops the scorer process, and continues it when its queue has been full for `held_s`."""

    def __init__(self, scorers: Any, held_s: float) -> None:
        self._process, self._places, self._held_s = psutil.Process(scorers._process.pid), scorers._heartbeat.queue_slots, held_s
        self.was_full = False
        self._process.suspend()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self._places.get_value() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.was_full = self._places.get_value() == 0
        time.sleep(self._held_s)
        self._process.resume()

    def join(self) -> None:
        """It goes on by now."""
        self._thread.join(PATIENCE_S)


@pytest.mark.skipif(sys.platform != "linux", reason="a semaphore's value cannot be read elsewhere")
def test_backpressure_on_the_actor_changes_no_result(world: Any, tmp_path: Path) -> None:
    changes = {"steps": 2, "overlap": {"chunk": {"size": 1}, "inter_step": "off"}}
    plain = world.run(world.spec(changes), tmp_path / "plain", inline=True)
    engine = world.assemble(world.spec(changes), tmp_path / "held", threads=2)
    try:
        stopped = Stopped(engine.scorers, held_s=0.5)
        with world.recorded() as steps:
            train(engine, lambda: False)
        stopped.join()
        assert stopped.was_full
        assert steps[0].metrics["actor/pg_loss"] == plain.steps[0].metrics["actor/pg_loss"]
        for name, weight in plain.weights("actor").items():
            assert torch.equal(weight, world.weights(tmp_path / "held", "actor")[name])
        first = next(json.loads(line) for line in (tmp_path / "held" / "events.jsonl").open() if '"kind":"step"' in line)
        assert first["metrics"]["idle_s/cpu:0/score"] >= 0.5
        assert first["metrics"]["timing_s/gen"] < first["metrics"]["timing_s/step"] - 0.5
    finally:
        engine.scorers.close()
        engine.journal.close()


def test_a_stall_is_cut_out_of_the_open_span() -> None:
    clock = iter([0.0, 1.0, 3.0, 4.0, 5.0, 6.0, 8.0, 9.0])
    trace = Recorder(("cpu:0",), lambda: next(clock))
    with trace.span("actor", "decode"):  # 0 … 6
        trace.blocked("score", next(clock))  # 1 … 3
        trace.blocked("score", next(clock))  # 4 … 5
    with trace.span("actor", "decode"):  # 8 … 9
        pass
    spans, waits = trace.take()
    assert [(span.start, span.end) for span in spans] == [(0, 1), (3, 4), (5, 6), (8, 9)]
    assert [(wait.start, wait.end, wait.cause) for wait in waits] == [(1, 3, "score"), (4, 5, "score")]


@pytest.mark.parametrize("chunk", [pytest.param(1, id="queue full", marks=pytest.mark.full), pytest.param(8, id="waiting")])
def test_a_scorer_process_that_shows_no_sign_of_life_is_taken_for_hung(world: Any, tmp_path: Path, chunk: int) -> None:
    changes = {"overlap": {"chunk": {"size": chunk}}, "resources": {"longest_silence_s": SILENCE_S}}
    engine = world.assemble(world.spec(changes), tmp_path, threads=2)
    process = psutil.Process(engine.scorers._process.pid)

    def stop() -> bool:
        if engine.progress.step == 1:
            process.suspend()
        return False

    try:
        with pytest.raises(ScorerError, match=f"no sign of life for {SILENCE_S:g} s"):
            train(engine, stop)
    finally:
        engine.scorers.close()
        engine.journal.close()
    assert engine.progress.step == 1
    assert not process.is_running()


@pytest.mark.full
def test_a_message_that_is_not_fully_received_is_aborted(world: Any, tmp_path: Path) -> None:
    """Larger than the socket buffer, so that a plain write would block forever."""
    engine = world.assemble(world.spec({"resources": {"longest_silence_s": 2}}), tmp_path, threads=2)
    try:
        psutil.Process(engine.scorers._process.pid).suspend()
        with pytest.raises(ScorerError, match="no sign of life for 2 s"):
            engine.scorers._send("start_save", "x" * 10_000_000)
    finally:
        engine.scorers.close()
        engine.journal.close()


@pytest.mark.full
def test_a_message_that_has_to_wait_for_a_slow_service_arrives(world: Any, server: RewardServer, tmp_path: Path) -> None:
    """The scorers wait for a service longer than `longest_silence_s` and receive nothing, but send heartbeats."""
    server.behave = lambda asked, number: server.hold() or score_response(asked)
    tree = rewarded(world, http(server, timeout_s=60), {"resources": {"longest_silence_s": SILENCE_S}})
    engine = world.assemble(load_spec(tree), tmp_path, threads=2)
    release = threading.Timer(1.5 * SILENCE_S, server.released.set)
    try:
        tokens = np.arange(3, 12)
        engine.scorers.extend([SequenceDelta(0, 4, tokens, True)], 1)
        engine.scorers.start_collect([0])
        release.start()
        engine.scorers._send("extend", [], "x" * 10_000_000)  # larger than the socket buffer
        assert server.released.is_set()
        response = FileCodec(world.folder / "actor").decode(tokens[4:].tolist())
        assert engine.scorers.wait_collect()[0].score == expected_score({"response": response, "ended": False})
    finally:
        release.cancel()
        engine.scorers.close()
        engine.journal.close()


def test_a_scorer_process_that_dies_with_a_full_queue_is_named(world: Any, tmp_path: Path) -> None:
    engine = world.assemble(world.spec(), tmp_path, threads=2)
    try:
        process = psutil.Process(engine.scorers._process.pid)
        process.suspend()
        for _ in range(QUEUE_SIZE):
            engine.scorers.extend([], 0)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(ScorerError, match="died with status -9"):
            engine.scorers.extend([], 0)
    finally:
        engine.scorers.close()
        engine.journal.close()


# ---- rewards in a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_rule_that_never_returns_ends_the_run_with_its_stack(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """It hangs at the second answer, so that the preflight passes."""
    install(tmp_path, "slow_rules", f"slow_rules_{threads}", SLOW_RULE, {"slow:hangs": "hangs"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    tree = rewarded(world, {"rule": "slow:hangs"}, {"resources": {"longest_silence_s": SILENCE_S}})
    reason = failure(world, tmp_path / "out", tree, threads)
    assert reason.startswith("RewardError" if threads == 1 else "ScorerError: RewardError")
    assert f"has not returned within {0.9 * SILENCE_S:g} s; it was in hangs (slow_rules_{threads}.py:" in reason


def test_a_rule_that_hangs_at_load_is_found_by_the_preflight(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "stuck_rules", "stuck_rules_of_a_test", STUCK_RULE, {"stuck:hangs": "hangs"})
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = rewarded(world, {"rule": "stuck:hangs"}, {"resources": {"longest_silence_s": SILENCE_S}})
    reason = failure(world, tmp_path / "out", tree, 2)
    assert "it was in hangs (stuck_rules_of_a_test.py:" in reason


def test_an_uninterruptible_rule_ends_the_process_and_logs_its_stack(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "endless_rules", "endless_rules_of_a_test", ENDLESS_RULE, {"endless:adds": "adds"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    tree = rewarded(world, {"rule": "endless:adds"}, {"resources": {"longest_silence_s": 1}})
    engine = world.start(tree, tmp_path / "alone", threads=1)
    status, errors = engine.end()
    assert status == 1
    assert "in adds" in errors


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_service_that_hangs_ends_the_run(world: Any, server: RewardServer, tmp_path: Path, threads: int) -> None:
    """The retries take longer than `longest_silence_s`; waiting for a service sends heartbeats."""

    def hang(asked: Any, number: int) -> Response:
        if number > 3:
            server.hold()
        return score_response(asked)

    server.behave = hang
    settings = {"timeout_s": 1.5, "attempts": 1, "break_after": 2}
    tree = rewarded(world, http(server, **settings), {"resources": {"longest_silence_s": SILENCE_S}})
    reason = failure(world, tmp_path, tree, threads)
    assert f"the reward service {server.place} failed" in reason
    assert "no response within 1.5 s" in reason
    assert reason.startswith("RewardError" if threads == 1 else "ScorerError: RewardError")


def test_a_service_that_recovers_costs_time_and_nothing_else(world: Any, server: RewardServer, tmp_path: Path) -> None:
    spec = load_spec(rewarded(world, http(server, answers_a_request=3)))
    well = world.run(spec, tmp_path / "well", threads=1)
    before = len(server.asked)
    server.behave = lambda asked, number: Response(503, b"busy") if number - before in (2, 3, 5) else score_response(asked)
    ill = world.run(spec, tmp_path / "ill", threads=1)
    for one, other in zip(well.steps, ill.steps, strict=True):
        assert one.tokens == other.tokens
        assert torch.equal(one.experience.scores, other.experience.scores)
    for name, weight in well.weights("actor").items():
        assert torch.equal(weight, ill.weights("actor")[name])


def test_a_service_that_goes_away_while_the_tail_decodes_ends_the_run(world: Any, server: RewardServer, tmp_path: Path) -> None:
    tree = rewarded(world, http(server, attempts=2, break_after=1), {"steps": 10_000, "overlap": {"update_overlap": True}})
    engine = world.assemble(load_spec(tree), tmp_path, threads=2)

    def stop() -> bool:
        if engine.progress.step == 2:
            server.gone = True
        return False

    try:
        with pytest.raises(ScorerError, match=f"RewardError: the reward service {server.place} failed"):
            train(engine, stop)
    finally:
        engine.scorers.close()
        engine.journal.close()
    assert engine.progress.step >= 2


def test_a_run_with_a_service_resumes_with_answers_in_flight(world: Any, server: RewardServer, tmp_path: Path) -> None:
    """Finished answers that were waiting are scored again, with the same scores."""
    spec: RunSpec = load_spec(rewarded(world, http(server), {"steps": 6, "checkpoints": {"every_steps": 3}}))
    whole = world.run(spec, tmp_path / "whole", threads=1)
    world.run(spec, tmp_path / "first", threads=1, stop_after=3)
    rest = world.run(spec, tmp_path / "rest", threads=1, resume=tmp_path / "first" / "checkpoints" / "step-00000003")
    assert [step.tokens for step in whole.steps[3:]] == [step.tokens for step in rest.steps]
    for name, weight in whole.weights("actor").items():
        assert torch.equal(weight, rest.weights("actor")[name])
