"""Checkpoint pins of the supervisor: the checkpoint to resume from exists, is valid, and is pinned while it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from oppo_contract.checkpoint_pins import pinned_names
from oppo_contract.wire import CheckpointRef
from tests.worker.test_supervisor import steps_of
from worker import checkpoint_pins as pins_module
from worker.checkpoint_pins import CheckpointPins
from worker.folders import AttemptFolder


def test_a_run_goes_on_from_its_checkpoint(bench) -> None:
    first = bench.attempt(steps=20, checkpoint_every=5, die_at=13)
    assert bench.supervise(1).wait() == 0
    last = first.checkpoints[-1]
    second = bench.attempt(2, steps=20)
    second.artifact_url = first.artifact_url
    second.resume_from = CheckpointRef(step=last["step"], url=last["url"], manifest_sha256=last["manifest_sha256"])
    assert bench.supervise(2).wait() == 0
    assert steps_of(second) == list(range(11, 21))
    assert second.outcome["outcome"] == "succeeded"


def test_a_fork_begins_with_the_checkpoint_in_another_runs_folder(bench) -> None:
    parent = bench.attempt(steps=10, checkpoint_every=5)
    assert bench.supervise(1).wait() == 0
    first = parent.checkpoints[0]
    fork = bench.attempt(2, steps=8)
    fork.artifact_url = parent.artifact_url.rsplit("/", 1)[0] + "/8"
    fork.resume_from = CheckpointRef(step=first["step"], url=first["url"], manifest_sha256=first["manifest_sha256"])
    assert bench.supervise(2).wait() == 0
    assert steps_of(fork) == [6, 7, 8]
    assert all(told["url"].startswith(fork.artifact_url) for told in fork.checkpoints)
    assert Path(first["url"].removeprefix("file://")).is_dir()


def test_checkpoints_of_pending_forks_are_pinned(tmp_path) -> None:
    attempt = AttemptFolder(tmp_path / "3")
    attempt.path.mkdir()
    pins = CheckpointPins(tmp_path / "run", attempt, None)
    pins.begin()
    pins.pin_for_others(["step-00000020", "../elsewhere", "a/b"])
    assert pinned_names(tmp_path / "run") == {"step-00000020"}
    pins.pin(tmp_path / "run" / "checkpoints" / "step-00000040")
    assert pinned_names(tmp_path / "run") == {"step-00000020", "step-00000040"}
    pins.pin_for_others([])
    assert pinned_names(tmp_path / "run") == {"step-00000040"}


def test_failed_pins_are_retried(tmp_path, monkeypatch) -> None:
    attempt = AttemptFolder(tmp_path / "3")
    attempt.path.mkdir()
    pins = CheckpointPins(tmp_path / "run", attempt, None)
    with monkeypatch.context() as away:
        away.setattr(pins_module, "write_pins", broken)
        with pytest.raises(OSError, match="stale"):
            pins.pin_for_others(["step-00000020"])
    pins.pin_for_others(["step-00000020"])
    assert pinned_names(tmp_path / "run") == {"step-00000020"}


def broken(*_: object) -> None:
    raise OSError("stale file handle")


def test_the_registered_checkpoint_stays_while_newer_ones_cannot_be_registered(bench, tools) -> None:
    """Otherwise a fenced run would be told to resume from a checkpoint that its engine has deleted."""
    attempt = bench.attempt(steps=100_000, step_s=0.01, checkpoint_every=5, keep=1)
    cut_off = False
    bench.platform.before = lambda path, _body: (503, {}) if cut_off and path.endswith(("/checkpoints", "/heartbeat")) else None
    process = bench.supervise()
    folder = Path(attempt.artifact_url.removeprefix("file://")) / "checkpoints"
    tools.eventually(lambda: attempt.checkpoints)
    cut_off = True
    known = {Path(attempt.checkpoints[-1]["url"]).name}

    def newest_step() -> int:
        return max(int(path.name.removeprefix("step-")) for path in folder.iterdir())

    begun = newest_step()
    tools.eventually(lambda: newest_step() > begun + 50, "ten more checkpoints")
    assert known <= {path.name for path in folder.iterdir()}
    assert len(list(folder.iterdir())) <= 4  # it, the one whose registration is under way, the newest, and its follower
    cut_off = False
    tools.eventually(lambda: not (known & {path.name for path in folder.iterdir()}), "the old one to be let go")
    process.terminate()
    assert process.wait() == 0
    assert Path(attempt.checkpoints[-1]["url"].removeprefix("file://")).is_dir()


def test_a_damaged_checkpoint_is_not_trained_from(bench) -> None:
    attempt = bench.attempt(steps=20)
    url = f"{attempt.artifact_url}/checkpoints/step-00000005"
    folder = Path(url.removeprefix("file://"))
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    attempt.resume_from = CheckpointRef(step=5, url=url, manifest_sha256="0" * 64)
    assert bench.supervise().wait() == 0
    assert attempt.outcome["outcome"] == "failed"
    assert "damaged" in attempt.outcome["reason"]
    assert not attempt.events["engine"]


def test_missing_checkpoint_does_not_fail_the_run(bench) -> None:
    """The file system may be mounted on another node, or later: the run's retries decide."""
    attempt = bench.attempt(steps=20)
    attempt.resume_from = CheckpointRef(step=5, url=f"{attempt.artifact_url}/checkpoints/step-00000005", manifest_sha256="0" * 64)
    assert bench.supervise().wait() == 0
    assert attempt.outcome["outcome"] == "node_failed"
    assert "step-00000005 is missing" in attempt.outcome["reason"]
    assert not attempt.events["engine"]
