"""CPU seconds of a process and its descendants: each second counts once, while they run and after they have ended."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
import time

import pytest

from oppo_core.trace.cpu_time import CpuTime, status_bytes

BURN = "import time\nwhile time.process_time() < {seconds}: pass\nprint('done', flush=True)\nimport sys; sys.stdin.read()"


def test_resident_memory_of_all_processes() -> None:
    measured = CpuTime(memory=True)
    before = measured.take()["perf/rss_gb"]
    hold = "held = bytearray(200 * 10**6)\nfor at in range(0, len(held), 4096): held[at] = 1\nprint('done', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert measured.take()["perf/rss_gb"] == pytest.approx(before + 0.21, abs=0.05)
        child.kill()
    assert "perf/rss_gb" not in CpuTime().take(), "a GPU's run has its GPU's memory instead"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports other processes' peaks")
def test_peak_memory_stays_when_it_is_released() -> None:
    measured = CpuTime(memory=True)
    before = measured.take()
    fill = "held = bytearray(200 * 10**6)\nfor at in range(0, len(held), 4096): held[at] = 1"
    hold = f"{fill}\ndel held\nprint('done', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = measured.take()
        assert after["perf/max_rss_gb"] >= before["perf/max_rss_gb"] + 0.2
        assert after["perf/rss_gb"] < before["perf/rss_gb"] + 0.1
        child.kill()
    assert status_bytes(2**31 - 1, "VmHWM") == 0, "no such process"
    assert "perf/max_rss_gb" not in CpuTime().take()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports shared memory")
def test_memory_that_processes_share_counts_once() -> None:
    """As the actor's frozen weights, which the reference in the scorers' process reads too."""
    measured = CpuTime(memory=True)
    size = 200 * 10**6
    read = "import mmap, sys, time\nheld = mmap.mmap(sys.stdin.fileno(), 0)\nsum(held[::4096])"
    hold = f"{read}\nprint('done', flush=True)\ntime.sleep(60)"
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as shared:
            shared[:] = b"1" * size
            before = measured.take()
            with subprocess.Popen([sys.executable, "-c", hold], stdin=file, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                child.stdout.readline()
                assert status_bytes(child.pid, "RssShmem") >= size
                assert measured.take()["perf/rss_gb"] == pytest.approx(before["perf/rss_gb"] + 0.015, abs=0.05)
                child.kill()


def test_cpu_seconds_of_children_count_once() -> None:
    measured = CpuTime()
    child = subprocess.Popen(
        [sys.executable, "-c", BURN.format(seconds=0.5)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    child.stdout.readline()
    own = time.process_time()
    running = measured.take()["perf/cpu_s"]
    child.communicate()
    ended = measured.take()["perf/cpu_s"]
    assert running >= 0.45
    assert running + ended == pytest.approx(0.5, abs=0.4 + time.process_time() - own)
    assert ended < 0.3, "the child's seconds counted again when it ended"
