"""Slurm on this machine, for `oppo bench scheduler --peers`: a controller, and a slurmd per node, whose GPUs are empty files.

Debian's packages slurmctld, slurmd, slurm-client and munge suffice; accounting, and with it fair shares, would need another
database. Jobs sleep until they are killed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from oppo_bench.platform_stack import wait_for
from oppo_bench.scheduler.load import GPUS_A_NODE
from oppo_cli.home import Failure
from oppo_platform.embedded.ports import saved_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "sinfo", "sdiag")
PACKAGES = "slurmctld slurmd slurm-client munge"
# Both schedulers may test every waiting job, a completed job starts a cycle at once, and backfill follows within a second.
TUNED = "default_queue_depth=100000,bf_max_job_test=100000,bf_interval=1,bf_continue,batch_sched_delay=0,sched_min_interval=0"
CONFIG = """
ClusterName=bench
SlurmctldHost=localhost
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters={tuned}
PriorityType=priority/basic
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
SlurmdParameters=config_overrides
MaxJobCount=1000000
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# Field 22 of a process's stat is when it started, in ticks since the machine did: with the id it names one process.
JOB = """#!/bin/sh
at=$(date +%s.%N)
set -- $(cat /proc/$$/stat)
echo "$at $$ ${{22}}" >{folder}/started/.$SLURM_JOB_ID
mv {folder}/started/.$SLURM_JOB_ID {folder}/started/$SLURM_JOB_ID
exec sleep 1000000
"""
LINE = re.compile(r"\[([-\dT:.]+)\] (.*)")
STARTED = re.compile(r"sched: Allocate JobId=(\d+)|sched/backfill: _start_job: Started JobId=(\d+)")
CYCLE = re.compile(r"Mean cycle:\s+(\d+)")


class Slurm:
    """A running cluster. Times are POSIX seconds."""

    def __init__(self, folder: Path, controller: subprocess.Popen[bytes]) -> None:
        self._folder, self._controller = folder, controller
        self._environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def submit(self, gpus: int, nice: int = 0, minutes: int | None = None) -> int:
        """Submit a job for GPUs of one node; the highest `nice` starts last. Returns its id."""
        asked = [f"--gres=gpu:{gpus}", "--nodes=1", "--cpus-per-task=1", "--mem=1", f"--nice={nice}", "--output=/dev/null"]
        limit = [f"--time={minutes}"] if minutes is not None else []
        return int(self._call("sbatch", "--parsable", *asked, *limit, str(self._folder / "job.sh")))

    def started(self) -> dict[int, tuple[float, int, int]]:
        """By job that `end` has not ended: when its program started, its process id, and when that process started in ticks."""
        files = [file for file in (self._folder / "started").iterdir() if not file.name.startswith(".")]
        rows = {int(file.name): file.read_text().split() for file in files}
        return {job: (float(at), int(pid), int(ticks)) for job, (at, pid, ticks) in rows.items()}

    def started_at(self, job: int) -> float | None:
        """When the job's program started; None if it has not."""
        row = self.started().get(job)
        return None if row is None else row[0]

    def running(self) -> list[int]:
        """Ids of jobs whose program runs."""
        return sorted(job for job, (_, pid, ticks) in self.started().items() if _is_running(pid, ticks))

    def end(self, jobs: Sequence[int]) -> None:
        """Kill the jobs' programs; Slurm sees them end."""
        started = self.started()
        for job in jobs:
            (self._folder / "started" / str(job)).unlink()
            _, pid, ticks = started[job]
            if _is_running(pid, ticks):
                os.kill(pid, signal.SIGKILL)

    def cancel_all(self) -> None:
        """Cancel every waiting and running job."""
        self._call("scancel", f"--user={os.geteuid()}")

    def log_size(self) -> int:
        """Place in the controller's log from which `starts` reads."""
        return (self._folder / "slurmctld.log").stat().st_size

    def starts(self, since: int) -> tuple[float | None, list[float]]:
        """From the controller's log: the time of the first end of a job, None without one, and of every start."""
        with (self._folder / "slurmctld.log").open() as log:
            log.seek(since)
            lines = [match.groups() for line in log if (match := LINE.match(line))]
        ended = [_posix(at) for at, text in lines if text.startswith("_job_complete:")]
        return min(ended, default=None), [_posix(at) for at, text in lines if STARTED.match(text)]

    def reset_cycles(self) -> None:
        """Begin a new period of `mean_cycles`."""
        self._call("sdiag", "--reset")

    def mean_cycles(self) -> tuple[float | None, float | None]:
        """Mean duration of a cycle of the main scheduler and of backfill in this period, milliseconds; None without one."""
        main, _, backfill = self._call("sdiag").partition("Backfilling stats")
        found = [CYCLE.search(part) for part in (main, backfill)]
        one, other = (int(match[1]) / 1e3 if match else None for match in found)
        return one, other

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The controller does nothing meanwhile."""
        self._controller.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._controller.send_signal(signal.SIGCONT)

    def idle_nodes(self) -> int:
        """Nodes without a job that accept one."""
        return int(self._call("sinfo", "--noheader", "--states=idle", "--format=%D") or 0)

    def _call(self, *command: str) -> str:
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failure(f"{command[0]} of Slurm failed: {done.stderr.strip()}")
        return done.stdout.strip()


def _is_running(pid: int, ticks: int) -> bool:
    """Whether the process that started then runs. Ids are used again; a command is empty while its program is being executed."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return False
    return int(fields[18]) == ticks and state != "Z"


def _posix(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


@contextmanager
def running_slurm(folder: Path, gpus: int) -> Iterator[Slurm]:
    """Start Slurm with its files in `folder`. Raises Failure if it cannot run here or does not start."""
    if os.geteuid() != 0:
        raise Failure("Slurm's daemons need root: run `oppo bench scheduler --peers` as root.")
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing:
        raise Failure(f"Slurm is not installed ({', '.join(missing)}). On Debian: apt-get install {PACKAGES}")
    names = _configure(folder, gpus)
    environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as stack, (folder / "daemons.log").open("wb") as log:

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(_stop, process)
            return process

        munge = [f"--{name}={folder}/munge.{suffix}" for name, suffix in (("key-file", "key"), ("socket", "socket"))]
        start("munged", "--foreground", "--force", *munge, f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed")
        wait_for((folder / "munge.socket").exists, "munged")
        slurm = Slurm(folder, start("slurmctld", "-D"))
        for name in names:
            start("slurmd", "-D", "-N", name)
        try:
            wait_for(lambda: slurm.idle_nodes() == len(names), "Slurm's nodes")
        except Failure as error:
            raise Failure(f"{error}\n{(folder / 'slurmctld.log').read_text()[-2000:]}") from None
        try:
            yield slurm
        finally:
            slurm.cancel_all()
            wait_for(lambda: slurm.idle_nodes() == len(names), "the jobs' ends")


def _configure(folder: Path, gpus: int) -> list[str]:
    """Write the configuration; returns the nodes' names."""
    for name in ("state", "started"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    for number in range(GPUS_A_NODE):
        (folder / f"gpu{number}").touch()
    names = [f"gpu-{number:03}" for number in range(gpus // GPUS_A_NODE)]
    shape = f"NodeHostname=localhost CPUs=64 RealMemory=4096 Gres=gpu:{GPUS_A_NODE}"
    nodes = "\n".join(f"NodeName={name} Port={saved_port(folder, name)} {shape}" for name in names)
    (folder / "slurm.conf").write_text(
        CONFIG.format(folder=folder, port=saved_port(folder, "slurmctld"), tuned=TUNED, nodes=nodes)
    )
    files = f"Name=gpu File={folder}/gpu[0-{GPUS_A_NODE - 1}]"
    (folder / "gres.conf").write_text("".join(f"NodeName={name} {files}\n" for name in names))
    (folder / "job.sh").write_text(JOB.format(folder=folder))
    return names


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
