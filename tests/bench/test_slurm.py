"""What `oppo bench scheduler --peers` reads of Slurm: its controller's log and its statistics."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from oppo_bench.scheduler import slurm as slurm_module
from oppo_bench.scheduler.race import compared
from oppo_bench.scheduler.slurm import JOB, Slurm, running_slurm
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


@contextmanager
def started_jobs(slurm: Slurm, folder: Path, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The script of jobs 1 to `count`, each as slurmd starts it, once all have recorded their starts."""
    (folder / "slurm_script").write_text(JOB.format(folder=folder))
    jobs = [
        subprocess.Popen(["sh", str(folder / "slurm_script")], env=os.environ | {"SLURM_JOB_ID": str(number)})
        for number in range(1, count + 1)
    ]
    try:
        while len(slurm.started()) < count:  # no pause: the last job is then still its shell, or has just replaced it
            assert all(job.poll() is None for job in jobs)
        yield jobs
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def test_a_job_is_killed_whatever_it_executes_after_its_start_is_recorded(slurm: Slurm, tmp_path: Path) -> None:
    for _ in range(20):
        before = time.time()
        with started_jobs(slurm, tmp_path, 2) as jobs:
            assert slurm.running() == [1, 2]
            assert all(before <= (slurm.started_at(number) or 0) <= time.time() for number in (1, 2))
            slurm.end([1, 2])
            assert [job.wait() for job in jobs] == [-9, -9]
            assert slurm.started() == {}


def test_another_process_with_a_jobs_id_is_not_killed(slurm: Slurm, tmp_path: Path) -> None:
    with started_jobs(slurm, tmp_path, 2) as jobs:
        at, pid, ticks = slurm.started()[2]
        (tmp_path / "started" / "2").write_text(f"{at} {pid} {ticks - 1}\n")
        assert slurm.running() == [1]
        slurm.end([1, 2])
        assert jobs[0].wait() == -9
        assert jobs[1].poll() is None


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
