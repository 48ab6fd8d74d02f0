"""What can fail. Each fault returns its line of the log and what undoes it, or None where it cannot strike now."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from oppo_bench.chaos.clock import Clock
from oppo_bench.chaos.processes import find
from oppo_bench.chaos.proxy import Proxy

BLOCK = 1 << 20
Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that struck: its line of the log, and after `lasts_s` seconds what undoes it."""

    text: str
    lasts_s: float = 0.0
    undo: Undo | None = None


@dataclass(slots=True)
class Target:
    """What the campaign may break."""

    home: Path
    proxy: Proxy
    clock: Clock
    small_disk: Path | None  # home of the second worker, on a file system of its own; None if none can be mounted
    rng: random.Random = field(default_factory=random.Random)
    engines_ended: int = 0
    backups: list[subprocess.Popen[bytes]] = field(default_factory=list)


def kill(target: Target, kind: str) -> Struck | None:
    """SIGKILL to one process of a kind."""
    if (process := _one(target, kind)) is None:
        return None
    target.engines_ended += kind == "engine"
    process.kill()
    return Struck(f"kill -9 of the {kind} (process {process.pid})")


def end(target: Target, kind: str) -> Struck | None:
    """SIGTERM to one process of a kind: an orderly stop, which `oppo up` or the agent answers with a new one."""
    if (process := _one(target, kind)) is None:
        return None
    target.engines_ended += kind == "engine"
    process.terminate()
    return Struck(f"SIGTERM to the {kind} (process {process.pid})")


def freeze(target: Target, kind: str) -> Struck | None:
    """SIGSTOP for some seconds, as a machine that swaps or a virtual machine that is moved."""
    if (process := _one(target, kind)) is None:
        return None
    seconds = target.rng.uniform(1, 12)
    process.send_signal(signal.SIGSTOP)

    def wake() -> None:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)

    return Struck(f"the {kind} (process {process.pid}) stands still for {seconds:.0f} s", seconds, wake)


def cut(target: Target) -> Struck:
    """No connection between the second worker and the platform."""
    seconds = target.rng.uniform(1, 15)
    target.proxy.cut()
    return Struck(f"the second worker is cut off for {seconds:.0f} s", seconds, target.proxy.heal)


def slow(target: Target) -> Struck:
    """A slow connection between the second worker and the platform."""
    seconds = target.rng.uniform(5, 15)
    target.proxy.delay_s = target.rng.uniform(0.1, 1.0)
    text = f"the second worker's connection is slow for {seconds:.0f} s ({target.proxy.delay_s:.1f} s per packet)"
    return Struck(text, seconds, target.proxy.heal)


def jump(target: Target) -> Struck | None:
    """The wall clock of the second worker's processes jumps, and back later."""
    if not target.clock.environ:
        return None
    seconds, offset = target.rng.uniform(3, 20), target.rng.choice((-7200, -90, 90, 7200))
    target.clock.set(offset)
    return Struck(f"the second worker's clock jumps by {offset} s for {seconds:.0f} s", seconds, lambda: target.clock.set(0))


def fill_disk(target: Target) -> Struck | None:
    """The second worker's disk is full for some seconds."""
    if target.small_disk is None:
        return None
    seconds, filler = target.rng.uniform(2, 12), target.small_disk / "filler"
    with filler.open("wb", buffering=0) as out, suppress(OSError):
        while True:
            out.write(bytes(BLOCK))
    with filler.open("ab", buffering=0) as out, suppress(OSError):
        while True:
            out.write(bytes(512))
    return Struck(f"the second worker's disk is full for {seconds:.0f} s", seconds, lambda: filler.unlink(missing_ok=True))


def back_up(target: Target) -> Struck:
    """A backup with checkpoints is taken meanwhile."""
    from oppo_cli.processes import oppo_command

    file = target.home / f"backup-{len(target.backups)}.tar"
    command = oppo_command("backup", str(file), "--with-checkpoints")
    with (target.home / "backups.log").open("ab") as log:
        environ = {**os.environ, "OPPO_HOME": str(target.home)}
        target.backups.append(subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
    return Struck("a backup begins")


def _one(target: Target, kind: str) -> psutil.Process | None:
    found = sorted(find(kind, target.home), key=lambda process: process.pid)
    return target.rng.choice(found) if found else None
