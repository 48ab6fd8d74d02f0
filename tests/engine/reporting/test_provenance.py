"""What a run was made of: git states, fingerprints, versions and the command, in the `started` event."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from oppo_core.reporting import provenance
from oppo_core.reporting.provenance import BLOCK_BYTES, BLOCKS, fingerprint, git_state


def git(folder: Path, *arguments: str) -> str:
    author = ["-c", "user.name=ada", "-c", "user.email=ada@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *author, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_of_a_checkout_and_whether_it_was_modified(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "rule.py").write_text("score = 1")
    assert git_state(tmp_path) is None  # it tracks nothing
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a rule")
    clean = git_state(tmp_path)
    assert clean is not None
    assert (clean.commit, clean.dirty) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "notes.txt").write_text("untracked")
    assert git_state(tmp_path) == clean
    (tmp_path / "rule.py").write_text("score = 2")
    assert git_state(tmp_path) == clean.model_copy(update={"dirty": True})
    (tmp_path / "site-packages").mkdir()
    assert git_state(tmp_path / "site-packages") is None  # an installed package inside a checkout


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(Path(__file__).parent) is None


def test_a_fingerprint_tells_weights_apart_and_reads_little(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"w" * 100)
    before = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("not a part of the model")
    assert fingerprint(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"w" * 99 + b"x")
    assert fingerprint(tmp_path) != before
    with (tmp_path / "model.safetensors").open("wb") as large:
        large.truncate(64 * BLOCKS * BLOCK_BYTES)
    empty = fingerprint(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as large:
        large.seek(-1, 2)
        large.write(b"x")
    assert fingerprint(tmp_path) != empty


def test_the_started_event_has_it(world: Any, tmp_path: Path) -> None:
    status, events = world.main(world.tree({"steps": 1}), tmp_path / "run")
    made_of = next(event for event in events if event.kind == "started").provenance
    assert status == 0
    assert {"python", "oppo", "torch"} <= set(made_of.versions)
    assert made_of.models["models.actor"] == fingerprint(world.folder / "actor")
    assert len(made_of.prompts) == 64
    assert shlex.split(made_of.command)[:5] == ["oppo", "train", "SPEC.yaml", "--out", "OUT"]
    assert ["--root", str(world.folder)] == shlex.split(made_of.command)[5:7]


def test_a_run_goes_on_without_it(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(folder: Path) -> str:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(provenance, "fingerprint", unreadable)
    status, events = world.main(world.tree({"steps": 1}), tmp_path / "run")
    assert (status, events[-1].outcome) == (0, "succeeded")
    assert [event.provenance for event in events if event.kind == "started"] == [None]
    lines = [line for event in events if event.kind == "log" for line in event.lines]
    assert any(line.startswith("The run's provenance is not recorded: [Errno 13]") for line in lines)


def test_versions_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "PACKAGES", {"oppo": "oppo-platform", "none": "no-such-package"})
    assert set(dict(provenance._versions())) == {"oppo"}
