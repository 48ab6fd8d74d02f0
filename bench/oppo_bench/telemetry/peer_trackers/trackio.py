"""trackio with its dashboard's server, which stores in SQLite."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oppo_bench.telemetry.peer_trackers.tracker import Columns, Limited, Server, TrackerError, keep_arrays

PROJECT, TOKEN = "bench", "bench"
STEPS_A_CALL = 1000
SHOWN = 3000  # points of a series that its page requests


class Trackio(Limited):
    """trackio as a tracker of the benchmark. It has no zoom, and its runs table sorts in the browser."""

    name = "trackio"
    can = frozenset({"ingest", "overview", "compare", "page"})

    def __init__(self, python: Path, port: int, folder: Path) -> None:
        self._python, self._folder, self._base_url = python, folder, f"http://127.0.0.1:{port}"
        self._environ = {"TRACKIO_DIR": str(folder / "data"), "TRACKIO_WRITE_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}
        command = [str(python), "-P", str(Path(__file__).with_name("trackio_peer.py"))]
        self._command, self._runs = command, 0
        self._server = Server(self.name, [*command, "serve", str(port)], self._base_url, folder, self._environ)
        self._server.http.headers["x-trackio-write-token"] = TOKEN
        self._server.wait_for(lambda: self._server.http.get("/version").is_success, "its start")

    def ingest(self, columns: Columns) -> float:
        """Calls of 1,000 steps, over one connection; its client sends fewer at a time."""
        [length] = {len(values) for values in columns.values()}
        run, keys = self._name(), list(columns)
        rows = list(zip(*(values.tolist() for values in columns.values()), strict=True))
        start = time.perf_counter()
        for first in range(0, length, STEPS_A_CALL):
            logs = [
                {
                    "project": PROJECT,
                    "run": run,
                    "step": step,
                    "metrics": dict(zip(keys, row, strict=True)),
                    "log_id": f"{run}-{step}",
                }
                for step, row in enumerate(rows[first : first + STEPS_A_CALL], start=first + 1)
            ]
            self._call("bulk_log", logs=logs, hf_token=None)
        self._wait_for(run, length)
        return time.perf_counter() - start

    def stored_bytes(self) -> int:
        """Of its database files."""
        return sum(file.stat().st_size for file in (self._folder / "data").rglob("*.db*"))

    def keep(self, runs: Sequence[Columns]) -> list[str]:
        """Through its own storage API, without HTTP."""
        names = [self._name() for _ in runs]
        keep_arrays([*self._command, "keep", PROJECT], self._folder / "kept.npz", names, runs, self._environ)
        return names

    def overview(self, run: str, key: str) -> list[float]:
        """As its page: all metrics of the run, at most 3,000 points. It caches requests."""
        [response] = self._logs([run])
        return [row[key] for row in response if key in row]

    def compare(self, runs: Sequence[str], key: str) -> int:
        """All runs in one request, as its page."""
        response = self._call(
            "get_logs_batch", project=PROJECT, runs=[{"run": run} for run in runs], max_points=SHOWN, scalar_only=True
        )
        assert len(response.json()["data"]) == len(runs)
        return int(response.num_bytes_downloaded)

    def page(self, run: str) -> tuple[str, str]:
        """The project's charts."""
        return f"{self._base_url}/?project={PROJECT}", "canvas.marks"

    def close(self) -> None:
        """End its server."""
        self._server.close()

    def _name(self) -> str:
        self._runs += 1
        return f"run-{self._runs}"

    def _logs(self, runs: Sequence[str]) -> list[list[Mapping[str, Any]]]:
        asked = {"project": PROJECT, "runs": [{"run": run} for run in runs], "max_points": SHOWN, "scalar_only": True}
        return [response["logs"] for response in self._call("get_logs_batch", **asked).json()["data"]]

    def _wait_for(self, run: str, step: int) -> None:
        def there() -> bool:
            [response] = self._logs([run])
            return bool(response) and response[-1]["step"] == step

        self._server.wait_for(there, f"step {step}")

    def _call(self, name: str, **given: Any) -> Any:
        answer = self._server.post(f"/api/{name}", json={"args": [], "kwargs": given})
        if answer.json().get("error") is not None:
            raise TrackerError(f"trackio's {name}: {answer.json()['error']}")
        return answer
