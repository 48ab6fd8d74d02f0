"""A wall clock that jumps, for the processes of one worker: libfaketime, preloaded, reads the offset from a file."""

from __future__ import annotations

from pathlib import Path

from oppo_bench.peer_environment import LIBFAKETIME, PeerEnvironmentError, ensure_environment

ENVIRONMENT = Path(__file__).resolve().parents[3] / "build" / "faketime"
REREAD_S = 1  # how often a process reads the file


class Clock:
    """The clock of processes that were started with `environ`; `environ` is empty if libfaketime cannot be installed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.environ: dict[str, str] = {}
        self.set(0)
        try:
            ensure_environment(ENVIRONMENT, LIBFAKETIME, print)
        except PeerEnvironmentError as error:
            print(f"no clock jumps: {error}", flush=True)
            return
        [library] = ENVIRONMENT.glob("lib/python*/site-packages/libfaketime/**/libfaketime.so.1")
        # The monotonic clock and the times of files stay as they are, as when an administrator sets the time.
        self.environ = {
            "LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_CACHE_DURATION": str(REREAD_S),
            "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1",
        }  # fmt: skip

    def set(self, offset_s: float) -> None:
        """Let the clock differ from the real one by this much from now on."""
        waiting = self._file.with_suffix(".new")
        waiting.write_text(f"{offset_s:+.0f}\n")
        waiting.replace(self._file)
