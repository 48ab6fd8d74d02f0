"""Attempts on several nodes, as workers see them: an address to tell, torchrun around the engine, and whose word comes first."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from oppo_contract import wire
from oppo_contract.events import FinishedEvent
from worker.folders import EngineEnd
from worker.outcomes import outcome_of
from worker.rendezvous import own_address, torchrun


def meeting(rank: int, port: int = 29500) -> wire.Rendezvous:
    """Of two nodes on this machine."""
    return wire.Rendezvous(nodes=2, node_rank=rank, address=wire.Address(host="127.0.0.1", port=port), deadline_s=60.0)


def test_the_address_is_the_one_towards_the_platform_with_a_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    told = own_address("http://127.0.0.1:8000")
    assert told is not None
    assert told.host == "127.0.0.1"
    with socket.create_server(("", told.port)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("OPPO_RENDEZVOUS_PORTS", str(port))
        assert own_address("http://127.0.0.1:8000") is None
    monkeypatch.setenv("OPPO_RENDEZVOUS_PORTS", f"{port}-{port}")
    monkeypatch.setenv("OPPO_RENDEZVOUS_HOST", "gpu1.example.org")
    assert own_address("http://127.0.0.1:8000") == wire.Address(host="gpu1.example.org", port=port)


def test_torchrun_goes_around_whatever_starts_an_engine() -> None:
    asked = ["--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "1", "--master-addr=127.0.0.1", "--master-port", "29500"]
    line = torchrun(["/env/bin/python3", "-m", "oppo_core", "--spec", "s"], meeting(1))
    assert line[: 3 + len(asked)] == ["/env/bin/python3", "-m", "torch.distributed.run", *asked]
    assert line[-4:] == ["-m", "oppo_core", "--spec", "s"]
    assert torchrun(["engine", "--spec", "s"], meeting(1))[-4:] == ["--no-python", "engine", "--spec", "s"]
    assert torchrun(["engine"], meeting(1))[0] == sys.executable


def test_an_engine_that_lost_the_others_has_died_and_may_be_tried_again() -> None:
    said = FinishedEvent(producer="engine", seq=1, time=0.0, outcome="failed", step=3, reason="RankError: rank 1 died")
    told = outcome_of(1, EngineEnd(exit_code=1), said, [])
    assert (told.outcome, told.reason) == ("engine_died", "RankError: rank 1 died")
    asked = outcome_of(1, EngineEnd(exit_code=1, signal="pause"), said, [])
    assert asked.outcome == "paused"  # it was to stop anyway
    other = said.model_copy(update={"reason": "PromptError: line 3"})
    assert outcome_of(1, EngineEnd(exit_code=1), other, []).outcome == "failed"


def test_two_supervisors_start_engines_below_torchrun_and_a_stop_reaches_the_engines(bench: Any, tools: Any) -> None:
    pair = [bench.attempt(number, steps=100_000) for number in (1, 2)]
    address = own_address("http://127.0.0.1:1")
    assert address is not None
    for rank, attempt in enumerate(pair):
        attempt.rendezvous = meeting(rank, address.port)
    supervisors = [bench.supervise(number) for number in (1, 2)]
    tools.eventually(lambda: all(attempt.kinds("step") for attempt in pair), "both to train")
    for attempt in pair:
        attempt.signal, attempt.deadline_s = "pause", 60.0
    assert [supervisor.wait(tools.PATIENCE_S) for supervisor in supervisors] == [0, 0]
    for attempt in pair:
        assert attempt.kinds("finished")[0]["outcome"] == "stopped"
        assert (attempt.outcome["outcome"], attempt.outcome["exit_code"]) == ("paused", 0)
        assert attempt.device_was_free


def test_an_engine_below_torchrun_is_cleared_away_with_its_torchrun(bench: Any, tools: Any) -> None:
    """What torchrun starts is in a session of its own, and must not be left on the device."""
    pair = [bench.attempt(number, steps=100_000, ignore_sigterm=True) for number in (1, 2)]
    address = own_address("http://127.0.0.1:1")
    assert address is not None
    for rank, attempt in enumerate(pair):
        attempt.rendezvous = meeting(rank, address.port)
    supervisors = [bench.supervise(number) for number in (1, 2)]
    tools.eventually(lambda: all(attempt.kinds("step") for attempt in pair), "both to train")
    for attempt in pair:
        attempt.fenced = True
    assert [supervisor.wait(tools.PATIENCE_S) for supervisor in supervisors] == [0, 0]
    assert not bench.engines(1)
    assert not bench.engines(2)
