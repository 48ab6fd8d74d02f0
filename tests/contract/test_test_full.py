"""`make test-full` runs its parts in order, and resumes with those that were not green on the same files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from scripts import test_full

ROOT = Path(__file__).resolve().parents[2]


class Runs:
    """Stands for the parts: notes which ran, with which seed, and lets `red` fail."""

    def __init__(self) -> None:
        self.red: set[str] = set()
        self.ran: list[str] = []
        self.seeds: set[int] = set()

    def __call__(self, part: str, seed: int) -> dict[str, Any]:
        self.ran.append(part)
        self.seeds.add(seed)
        return {"green": part not in self.red, "seconds": 1, "passed": 2, "failed": int(part in self.red), "skipped": 0}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    made = Runs()
    monkeypatch.delenv("OPPO_TEST_SEED", raising=False)
    monkeypatch.setattr(test_full, "FOLDER", tmp_path)
    monkeypatch.setattr(test_full, "STATE", tmp_path / "state.json")
    monkeypatch.setattr(test_full, "tree_id", lambda: "one")
    monkeypatch.setattr(test_full, "run", made)
    return made


def test_the_next_run_has_only_the_parts_that_were_red(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.red = {"web"}
    assert test_full.main([]) == 1
    assert runs.ran == list(test_full.PARTS)
    assert re.search(r"^web +RED +1 +2 +1 +0$", capsys.readouterr().out, re.MULTILINE)
    runs.ran, runs.red = [], set()
    assert test_full.main([]) == 0
    assert runs.ran == ["web"]
    assert len(runs.seeds) == 1
    runs.ran = []
    assert test_full.main([]) == 0
    assert runs.ran == []


def test_named_part_runs_again(runs: Runs) -> None:
    assert test_full.main(["engine"]) == test_full.main(["engine"]) == 0
    assert runs.ran == ["engine", "engine"]
    assert test_full.main(["nothing"]) == 2


def test_changed_files_start_anew(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert test_full.main([]) == 0
    monkeypatch.setattr(test_full, "tree_id", lambda: "two")
    assert test_full.main([]) == 0
    assert runs.ran == [*test_full.PARTS, *test_full.PARTS]


def test_the_tree_is_that_of_the_files() -> None:
    assert re.fullmatch(r"[0-9a-f]{40,64}|", test_full.tree_id())


def test_every_part_has_a_target() -> None:
    targets = re.findall(r"^part-([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets == list(test_full.PARTS)


def test_a_report_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "part.xml"
    report.write_text('<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>')
    assert test_full.counts(report) == {"passed": 3, "failed": 3, "skipped": 3}
    assert test_full.counts(tmp_path / "none.xml") == {"passed": 0, "failed": 0, "skipped": 0}
