"""Interface of a tracker in the benchmark, and the server process that most of them have."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
from numpy.typing import NDArray

Columns = Mapping[str, NDArray[np.float64]]  # metric → its value at steps 1, 2, …
STARTS_WITHIN_S, STOPS_WITHIN_S = 120.0, 20.0


class TrackerError(RuntimeError):
    """A tracker did not start, answered with an error, or returned wrong values."""


class Tracker(Protocol):
    """A tracker. Operations that it lacks are missing from `can`, and their methods raise TrackerError."""

    name: str
    can: frozenset[str]

    def ingest(self, columns: Columns) -> float:
        """Send a new run over HTTP until the last point can be read. Returns seconds."""

    def stored_bytes(self) -> int:
        """Size of all metrics on disk, with indexes, after maintenance."""

    def keep(self, runs: Sequence[Columns]) -> list[str]:
        """Store finished runs in the fastest way. Returns their names."""

    def overview(self, run: str, key: str) -> list[float]:
        """All data of a chart of the whole series, as its own page requests it."""

    def zoom(self, run: str, key: str, first: int, last: int) -> None:
        """The same for a range of steps."""

    def compare(self, runs: Sequence[str], key: str) -> int:
        """One metric of many runs as its own page requests it. Returns bytes received."""

    def list_runs(self, count: int, keys: Sequence[str]) -> None:
        """Store this many runs with a last value of each of these metrics."""

    def table(self, key: str, rows: int) -> None:
        """The first rows of all runs, the highest value first."""

    def page(self, run: str) -> tuple[str, str]:
        """(address, selector to wait for) of the page with a run's charts."""

    def screen(self, run: str) -> tuple[str, str]:
        """(address, JavaScript function) of a page of all metrics: the number of charts in the window, once all are drawn."""

    def compare_page(self, runs: Sequence[str], key: str) -> tuple[str, str]:
        """(address, JavaScript function) of a page with a metric of many runs: whether all curves are drawn."""

    def keep_samples(self, count: int, seed: int) -> str:
        """Store a run with `load.random_samples`. Returns its name."""

    def best_samples(self, run: str, rows: int) -> None:
        """The samples with the highest rewards, as its own page requests them."""

    def find_samples(self, run: str, words: Sequence[str], rows: int) -> None:
        """Samples with all of these words, as its own page requests them."""


class Limited:
    """Default methods of a tracker that lacks an operation."""

    name = ""

    def _unable(self) -> TrackerError:
        return TrackerError(f"{self.name} cannot do that.")

    def ingest(self, columns: Columns) -> float:
        """No HTTP ingest."""
        raise self._unable()

    def zoom(self, run: str, key: str, first: int, last: int) -> None:
        """No zoom."""
        raise self._unable()

    def list_runs(self, count: int, keys: Sequence[str]) -> None:
        """No table of runs."""
        raise self._unable()

    def table(self, key: str, rows: int) -> None:
        """No table of runs."""
        raise self._unable()

    def screen(self, run: str) -> tuple[str, str]:
        """Draws no run of 300 metrics."""
        raise self._unable()

    def compare_page(self, runs: Sequence[str], key: str) -> tuple[str, str]:
        """No page of many runs alone."""
        raise self._unable()

    def keep_samples(self, count: int, seed: int) -> str:
        """No samples that the server sorts or searches."""
        raise self._unable()

    def best_samples(self, run: str, rows: int) -> None:
        """No samples that the server sorts or searches."""
        raise self._unable()

    def find_samples(self, run: str, words: Sequence[str], rows: int) -> None:
        """No samples that the server sorts or searches."""
        raise self._unable()


def keep_arrays(
    script: Sequence[str], file: Path, names: Sequence[str], runs: Sequence[Columns], environ: Mapping[str, str]
) -> None:
    """Run a script in a tracker's environment that stores runs, an array `RUN KEY` per series. Raises TrackerError."""
    arrays = {
        f"{name} {key.replace('/', '|')}": values
        for name, columns in zip(names, runs, strict=True)
        for key, values in columns.items()
    }
    np.savez(file, **arrays)  # type: ignore[arg-type]
    environ = {**os.environ, **environ, "PYTHONPATH": ""}
    done = subprocess.run([*script, str(file)], env=environ, cwd=file.parent, capture_output=True, text=True, check=False)
    file.unlink()
    if done.returncode:
        raise TrackerError(f"The runs were not stored: {done.stderr[-2000:]}")


class Server:
    """A tracker's server process, its HTTP client, and its log."""

    def __init__(self, name: str, command: Sequence[str], base_url: str, folder: Path, environ: Mapping[str, str]) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DJANGO"))}
        self.name = name
        self._log = (folder / "log.txt").open("w+")
        self._process = subprocess.Popen(
            command, env={**kept, **environ}, stdout=self._log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
        )
        self.http = httpx.Client(base_url=base_url, timeout=600.0)

    def wait_for(self, ready: Callable[[], bool], what: str, within_s: float = STARTS_WITHIN_S) -> None:
        """Poll until it is true. Raises TrackerError."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                if ready():
                    return
            except httpx.TransportError:
                pass  # not listening yet
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TrackerError(f"{self.name}: {what} did not happen. Its last words:\n{self._last_words()}")
            time.sleep(0.1)

    def get(self, path: str, **asked: Any) -> httpx.Response:
        """GET with these parameters. Raises TrackerError for an error."""
        return self._checked(self.http.get(path, params=asked))

    def post(self, path: str, **sent: Any) -> httpx.Response:
        """POST with httpx's own arguments. Raises TrackerError for an error."""
        return self._checked(self.http.post(path, **sent))

    def _checked(self, answer: httpx.Response) -> httpx.Response:
        if answer.is_error:
            raise TrackerError(f"{self.name} answered {answer.status_code} to {answer.request.url}: {answer.text[:500]}")
        return answer

    def close(self) -> None:
        """End it with all its processes."""
        self.http.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            pass  # its children are ended below
        try:
            os.killpg(self._process.pid, 9)
        except ProcessLookupError:
            pass  # it has already ended
        self._process.wait()
        self._log.close()

    def _last_words(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return self._log.read()[-2000:]
