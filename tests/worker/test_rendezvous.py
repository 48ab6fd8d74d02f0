"""Rendezvous: the node's address, the torchrun command, and the root cause among several ranks."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from oppo_contract import wire
from oppo_contract.events import FinishedEvent
from oppo_contract.spec import load_spec
from worker.folders import AttemptFolder, EngineEnd
from worker.outcomes import build_outcome, find_root_cause
from worker.redaction import Redactor
from worker.rendezvous import check_address, own_address, ranks_per_node, torchrun, torchrun_environ

MINIMAL = {
    "name": "n", "steps": 1, "data": {"prompts": "p"}, "ppo": {"batch_size": 24},
    "models": {"actor": {"path": "a"}, "reward": {"rule": "r:score"}},
}  # fmt: skip


def meeting(rank: int, port: int = 29500) -> wire.Rendezvous:
    """Two nodes on this machine."""
    return wire.Rendezvous(nodes=2, node_rank=rank, address=wire.Address(host="127.0.0.1", port=port), deadline_s=60.0)


@pytest.mark.parametrize(
    ("variable", "odd"),
    [
        *(
            ("OPPO_RENDEZVOUS_PORTS", odd)
            for odd in ("29500-29599,30000", "29599-29500", "70000", "0", "-1", "a-b", "29500-x", "1-2-3")
        ),
        *(("OPPO_RENDEZVOUS_HOST", odd) for odd in ("http://gpu1", "gpu 1", "gpu1:29500/x", "-gpu1", "g" * 256)),
    ],
)
def test_invalid_rendezvous_environment_is_rejected(variable: str, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, odd)
    with pytest.raises(ValueError, match=variable) as said:
        check_address()
    assert repr(odd) in str(said.value)


@pytest.mark.parametrize(
    ("ports", "host"), [("", ""), (" ", " "), ("29500", "gpu1"), (" 29500 - 29599 ", " 10.0.0.7 "), ("1-65535", "::1")]
)
def test_valid_rendezvous_environment_is_accepted(ports: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPPO_RENDEZVOUS_PORTS", ports)
    monkeypatch.setenv("OPPO_RENDEZVOUS_HOST", host)
    check_address()
    own_address("http://127.0.0.1:8000")  # None where all those ports are taken


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


def test_torchrun_wraps_any_engine_command() -> None:
    asked = ["--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "1", "--master-addr=127.0.0.1", "--master-port", "29500"]
    line = torchrun(["/env/bin/python3", "-m", "oppo_core", "--spec", "s"], 1, meeting(1))
    assert line[: 3 + len(asked)] == ["/env/bin/python3", "-m", "torch.distributed.run", *asked]
    assert line[-4:] == ["-m", "oppo_core", "--spec", "s"]
    assert torchrun(["engine", "--spec", "s"], 1, meeting(1))[-4:] == ["--no-python", "engine", "--spec", "s"]
    assert torchrun(["engine"], 1, meeting(1))[0] == sys.executable


def test_ranks_of_one_node_use_a_local_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPPO_RENDEZVOUS_HOST", "gpu1.example.org")  # which is for other nodes
    monkeypatch.setenv("OPPO_RENDEZVOUS_PORTS", "1")
    line = torchrun(["/env/bin/python3", "-m", "oppo_core"], 4, None)
    assert line[3:11] == [
        "--nnodes",
        "1",
        "--node-rank",
        "0",
        "--nproc-per-node",
        "4",
        "--master-addr=127.0.0.1",
        "--master-port",
    ]
    assert int(line[11]) > 1
    assert line[12:] == ["--max-restarts", "0", "--log-dir", "/dev/null", "-m", "oppo_core"]
    assert torchrun_environ(line) == {"OMP_NUM_THREADS": "1"}
    assert torchrun_environ(torchrun(["engine"], 1, meeting(1))) == torchrun_environ(["engine"]) == {}


@pytest.mark.parametrize(
    ("resources", "each"),
    [
        (None, 1), ({}, 1), ({"devices": 8}, 8), ({"devices": 8, "nodes": 2}, 4),
        ({"devices": 2, "nodes": 2, "processes": 3, "kind": "cpu"}, 3), ({"devices": 2, "processes": None}, 2),
    ],
)  # fmt: skip
def test_ranks_per_node_follow_devices_or_processes(resources: dict[str, Any] | None, each: int) -> None:
    assert ranks_per_node({"resources": resources}) == each
    if resources:
        assert load_spec({**MINIMAL, "resources": resources}).resources.ranks_per_node == each


@pytest.mark.parametrize("elsewhere", [{"decoding_devices": 4}, {"decoding_devices": 2, "scoring_devices": 2}])
def test_decoding_and_scoring_devices_have_no_rank(elsewhere: dict[str, int]) -> None:
    resources = {"devices": 12, "nodes": 2} | elsewhere
    decoded = {"resources": resources, "rollout": {"backend": "vllm"}}
    spec = load_spec({**MINIMAL, **decoded, "ppo": {"batch_size": 24, "tis": "all"}})
    assert ranks_per_node(decoded) == spec.resources.ranks_per_node == 2


def test_rank_error_is_retried() -> None:
    said = FinishedEvent(producer="engine", seq=1, time=0.0, outcome="failed", step=3, reason="RankError: rank 1 died")
    told = build_outcome(1, EngineEnd(exit_code=1), said, [])
    assert (told.outcome, told.reason) == ("engine_died", "RankError: rank 1 died")
    asked = build_outcome(1, EngineEnd(exit_code=1, signal="pause"), said, [])
    assert asked.outcome == "paused"  # it was to stop anyway
    other = said.model_copy(update={"reason": "PromptError: line 3"})
    assert build_outcome(1, EngineEnd(exit_code=1), other, []).outcome == "failed"


@pytest.mark.full
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


@pytest.mark.full
def test_engine_below_torchrun_is_cleaned_up(bench: Any, tools: Any) -> None:
    """torchrun's processes have their own sessions and must not remain on the device."""
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


def ended(outcome: str, reason: str) -> str:
    """A rank's last event as a line of its file."""
    told = {"producer": "engine", "seq": 3, "time": 0.0, "kind": "finished", "outcome": outcome, "step": 1, "reason": reason}
    return json.dumps(told) + "\n"


def test_root_cause_is_the_failed_rank(tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path / "7")
    folder.path.mkdir()
    lost = FinishedEvent(producer="engine", seq=1, time=0.0, outcome="failed", step=1, reason="RankError: rank 2 has ended")
    redactor = Redactor({"KEY": "s3cret-key"})
    assert find_root_cause(lost, folder, redactor) == lost
    assert find_root_cause(None, folder, redactor) is None
    beside = folder.engine_events
    beside.with_name(beside.name + ".process-1").write_text(ended("failed", "RankError: rank 2 has ended"))
    beside.with_name(beside.name + ".process-2").write_text(ended("failed", "RewardError: 401 for s3cret-key") + '{"half')
    told = find_root_cause(lost, folder, redactor)
    assert told is not None
    assert told.reason.startswith("RewardError: 401 for ")
    assert "s3cret" not in told.reason
    assert find_root_cause(None, folder, redactor) == told  # torchrun has killed the first one
    stopped = lost.model_copy(update={"outcome": "stopped", "reason": "asked to stop"})
    assert find_root_cause(stopped, folder, redactor) == stopped
