"""What `oppo bench scheduler --peers` reads of Slurm: its controller's log and its statistics."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from oppo_bench.scheduler import slurm as slurm_module
from oppo_bench.scheduler.race import compared
from oppo_bench.scheduler.slurm import SLEEP, Slurm, running_slurm
from oppo_cli.home import Failure

LOG = """\
[2026-11-26T16:29:06.100] sched: Allocate JobId=300 NodeList=gpu-001 #CPUs=1 Partition=all
[2026-11-26T16:29:06.455] _job_complete: JobId=217 WTERMSIG 9
[2026-11-26T16:29:06.456] _job_complete: JobId=217 done
[2026-11-26T16:29:06.698] sched: Allocate JobId=315 NodeList=gpu-013 #CPUs=1 Partition=all
[2026-11-26T16:29:07.321] sched/backfill: _start_job: Started JobId=313 in all on gpu-005
"""
STATISTICS = """\
Main schedule statistics (microseconds):
\tLast cycle:   880
\tMean cycle:   7117
Backfilling stats
\tMean cycle: 545191
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    (tmp_path / "started").mkdir()
    (tmp_path / "slurmctld.log").write_text(LOG)
    return Slurm(tmp_path, subprocess.Popen(["true"]))


def test_ends_and_starts_are_read_from_the_log(slurm: Slurm) -> None:
    ended, started = slurm.starts(0)
    assert ended is not None
    assert [round(1e3 * (start - ended)) for start in started] == [-355, 243, 866]
    assert slurm.starts(slurm.log_size()) == (None, [])


def test_mean_cycles_are_read_from_the_statistics(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = STATISTICS
    monkeypatch.setattr(slurm, "_call", lambda *command: printed)
    assert slurm.mean_cycles() == (7.117, 545.191)
    printed = STATISTICS.replace("\tMean cycle:   7117\n", "")
    assert slurm.mean_cycles() == (None, 545.191)


def test_only_a_jobs_own_program_is_killed(slurm: Slurm, tmp_path: Path) -> None:
    job, other = subprocess.Popen(SLEEP.split()), subprocess.Popen(["sleep", "1000"])
    try:
        for number, process in ((1, job), (2, other)):
            (tmp_path / "started" / str(number)).write_text(f"12.5 {process.pid}\n")
        assert slurm.running() == [1]
        assert slurm.started_at(1) == 12.5
        slurm.end([1, 2])
        assert job.wait() == -9
        assert other.poll() is None
        assert slurm.started() == {}
    finally:
        job.kill()
        other.kill()


def test_a_job_that_has_just_started_is_killed_in_its_shell(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "slurm_script").write_text("read line\n")
    job = subprocess.Popen(["sh", str(tmp_path / "slurm_script")], stdin=subprocess.PIPE)
    try:
        (tmp_path / "started" / "1").write_text(f"12.5 {job.pid}\n")
        slurm.end([1])
        assert job.wait() == -9
    finally:
        job.kill()


def test_a_machine_without_slurm_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(slurm_module.shutil, "which", lambda program: None)
    with pytest.raises(Failure, match=r"munged.*apt-get install slurmctld"), running_slurm(tmp_path, 8):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Failure, match="need root"), running_slurm(tmp_path, 8):
        pass


def test_turns_without_a_value_are_left_out_and_ratios_are_those_of_a_turn() -> None:
    ours: list[Any] = [10.0, None, 20.0]
    named = {row.name: row for row in compared("freed_ms", ours, {"Slurm": [100.0, 5.0, None]})}
    assert (named["freed_ms/OPPO"].n, named["freed_ms/Slurm"].n) == (2, 2)
    ratio = named["freed_ms/Slurm/ours_times_better"]
    assert (ratio.median, ratio.n) == (10.0, 1)
    assert named["freed_ms/p95/Slurm/ours_times_better"].median == 5.0
    with pytest.raises(Failure, match="freed_ms has no value of Slurm in 3 turns"):
        compared("freed_ms", ours, {"Slurm": [None] * 3})
