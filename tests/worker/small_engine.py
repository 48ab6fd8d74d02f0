"""An engine without training: command line and events of the real one, with misbehaviour configured by its spec.

spec["engine"]: steps, step_s, checkpoint_every, ignore_sigterm, sigterm_at_start, die_at (a step), exit_code, leave_child,
say (lines a step), bulk (metrics a step), keep (checkpoints, but for those that are spared), blab (an environment variable that
it tells everybody, and then fails), tell (a file in which it describes its process).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from oppo_contract.checkpoint_pins import pinned_names, pins_locked

stopping = threading.Event()


class Journal:
    """Appends events; continues the file's numbering."""

    def __init__(self, file: Path) -> None:
        self.seq = len(file.read_bytes().splitlines()) if file.exists() else 0
        self.file = file.open("a")

    def write(self, kind: str, **fields: Any) -> None:
        self.seq += 1
        self.file.write(json.dumps({"producer": "engine", "seq": self.seq, "time": time.time(), "kind": kind, **fields}) + "\n")
        self.file.flush()


def checkpoint(out: Path, step: int, journal: Journal, keep: int = 0) -> None:
    folder = out / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    manifest = json.dumps({"step": step}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    digest = hashlib.sha256(manifest).hexdigest()
    journal.write("checkpoint", step=step, folder=f"checkpoints/{folder.name}", manifest_sha256=digest, bytes=len(manifest))
    with pins_locked(out):
        for old in sorted((out / "checkpoints").iterdir())[:-keep] if keep else ():
            if old.name not in pinned_names(out):
                shutil.rmtree(old)


def end_with_lifeline() -> None:
    if "OPPO_LIFELINE_FD" not in os.environ:  # below torchrun
        return
    fd = int(os.environ["OPPO_LIFELINE_FD"])

    def wait() -> None:
        os.read(fd, 1)
        os._exit(113)

    threading.Thread(target=wait, daemon=True).start()


def train(how: dict[str, Any], out: Path, journal: Journal, first: int) -> None:
    steps = how.get("steps", 5)
    if "blab" in how:
        told = os.environ[how["blab"]]
        print(f"the token is {told}!", flush=True)
        print(f"Bearer {told}", file=sys.stderr, flush=True)
        journal.write("log", stream="stderr", lines=[told])
        journal.write("finished", outcome="failed", step=0, reason=f"401 for {told}")
        return
    journal.write("started", devices=["cpu:0"], lanes=[["cpu:0", "actor"]], start_step=first, total_steps=steps)
    for step in range(first + 1, steps + 1):
        time.sleep(how.get("step_s", 0.01))
        if step == how.get("die_at"):
            print("about to die", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        for line in range(how.get("say", 0)):
            print(f"step {step} line {line}", flush=True)
        metrics = {"reward": float(step), **{f"m{i}/{'x' * 150}": 1.0 for i in range(how.get("bulk", 0))}}
        numbers = {"elapsed_s": step, "generated_tokens": step, "device_seconds": step}
        journal.write("step", step=step, metrics=metrics, **numbers)
        if step % how.get("checkpoint_every", 10) == 0:
            checkpoint(out, step, journal, how.get("keep", 0))
        if stopping.is_set():
            checkpoint(out, step, journal)
            journal.write("finished", outcome="stopped", step=step, reason="asked to stop")
            return
    journal.write("finished", outcome="succeeded", step=steps, reason="all steps are done")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    for name in ("--spec", "--out", "--events", "--resume-from"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--root", action="append")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    end_with_lifeline()
    how = json.loads(options.spec.read_text())["engine"]
    if how.get("exit_code") == 2:
        print("models.actor.path: no such model", file=sys.stderr)
        return 2
    if how.get("sigterm_at_start"):
        os.kill(os.getpid(), signal.SIGTERM)
    ignore = how.get("ignore_sigterm")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore else lambda _number, _frame: stopping.set())
    if how.get("leave_child"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(options.out)])
    if "tell" in how:
        process = {"pid": os.getpid(), "session": os.getsid(0), "folder": os.getcwd(), "arguments": sys.argv[1:]}
        Path(how["tell"]).write_text(json.dumps({**process, "path": sys.path, "environ": dict(os.environ)}))
    first = json.loads((options.resume_from / "manifest.json").read_text())["step"] if options.resume_from else 0
    train(how, options.out, Journal(options.events), first)
    return 0


if __name__ == "__main__":
    sys.exit(main())
