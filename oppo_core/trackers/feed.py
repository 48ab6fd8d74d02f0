"""The engine's side of one tracker: a process, what waits for it, and what it has to say."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from oppo_core.trackers.backlog import Backlog
from oppo_core.trackers.order import WANDB_KEY, Order

READ_BYTES = 65536


class Feed:
    """One tracker. Everything but `wait` returns at once, whatever its process does.

    `taken`: steps that it has taken, or has good reasons to leave alone.
    """

    def __init__(self, order: Order, most: int | None = None) -> None:
        """Start the process. Raises OSError when there can be none."""
        self.title = order.title
        self.taken = 0
        self._backlog = Backlog() if most is None else Backlog(most)
        self._rest = b""
        self._said_late = self._said_gone = False
        order.folder.mkdir(parents=True, exist_ok=True)
        self.log = order.folder / f"{order.tracker}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "oppo_core.trackers"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=_environment(),
            )  # fmt: skip
        assert self.process.stdout is not None
        self._answers = self.process.stdout.fileno()
        os.set_blocking(self._answers, False)
        self.put("order", order.line())
        self._pump = threading.Thread(target=self._pump_lines, name=f"tracker-{order.tracker}", daemon=True)
        self._pump.start()

    def put(self, kind: str, line: str) -> None:
        """A line for the tracker; it may be left out when too much waits."""
        self._backlog.put(kind, line)

    def news(self) -> list[str]:
        """What there is to say of it since the last call, sentences."""
        said = self._read()
        if self._backlog.dropped and not self._said_late:
            self._said_late = True
            said.append(f"{self.title} does not keep up: from here on some steps are left out of it. Training goes on.")
        if self.process.poll() is not None and not self._said_gone:
            self._said_gone = True
            said.append(
                f"{self.title}: its process has ended with status {self.process.returncode}, so that no more is told to it;"
                f" {self.log} has its last words. Training goes on; a resumed run tries again."
            )
        return said

    def end(self, outcome: str) -> None:
        """Nothing more comes."""
        self._said_gone = True  # that is how it should be
        self.put("end", json.dumps({"kind": "end", "outcome": outcome}))
        self._backlog.close()

    def wait(self, until: float) -> list[str]:
        """After `end`: wait for it to take everything, until `time.monotonic()` is `until`, then end it. Returns its news."""
        said: list[str] = []
        while (left := until - time.monotonic()) > 0 and self.process.poll() is None:
            select.select([self._answers], [], [], min(left, 0.05))
            said += self._read()
        late = self.process.poll() is None
        if late:
            self.process.kill()
        self.process.wait()
        said += self._read()
        self._pump.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        lost = self._backlog.told - self.taken
        if lost > 0:
            why = "it had not taken them when time was up (logging.trackers.flush_s)" if late else "they waited for too long"
            why = why if late or self._backlog.dropped >= lost else f"its process had ended ({self.log})"
            said.append(f"{self.title}: {lost} of {self._backlog.told} steps were left out of it: {why}.")
        return said

    def _pump_lines(self) -> None:
        """In a thread of its own: it may wait for the process."""
        pipe = self.process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):  # the process is gone
            while (line := self._backlog.take()) is not None:
                pipe.write(line.encode() + b"\n")
                pipe.flush()
        with contextlib.suppress(OSError):
            pipe.close()

    def _read(self) -> list[str]:
        said = []
        while block := self._read_block():
            *lines, self._rest = (self._rest + block).split(b"\n")
            for message in map(json.loads, lines):
                self.taken += message.get("taken", 0)
                said += [f"{self.title}: {message['say']}"] if "say" in message else []
        return said

    def _read_block(self) -> bytes:
        try:
            return os.read(self._answers, READ_BYTES)
        except BlockingIOError:
            return b""


def _environment() -> dict[str, str]:
    """The engine's, and where its modules come from; a tracker has no business on a GPU.

    Of W&B's own variables the key alone: the spec decides, not what was left in some shell.
    """
    paths = [str(Path(entry).absolute()) for entry in sys.path if entry]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") or name == WANDB_KEY}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
