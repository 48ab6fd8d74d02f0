"""TensorBoard, which reads event files and keeps a sample of them in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from oppo_bench.telemetry.peer_trackers.tracker import Columns, Limited, Server, keep_arrays

SERIES = "/experiment/defaultExperimentId/data/plugin/timeseries/timeSeries"
TAGS = "/experiment/defaultExperimentId/data/plugin/timeseries/tags"
READS_WITHIN_S = 600.0
# The number of cards in the window, once each has its chart. What a chart has drawn cannot be read from its canvas.
SCREEN = """() => {
  const cards = [...document.querySelectorAll("scalar-card")].filter((card) => {
    const { top, bottom, height } = card.getBoundingClientRect();
    return height && bottom > 0 && top < innerHeight;
  });
  return cards.every((card) => card.querySelector("line-chart canvas")) && cards.length;
}"""


class TensorBoard(Limited):
    """TensorBoard as a tracker of the benchmark. It has no HTTP ingest, zoom or table of runs, and keeps ten texts of a run."""

    name = "TensorBoard"
    can = frozenset({"overview", "compare", "page", "screen", "compare_page"})

    def __init__(self, python: Path, port: int, folder: Path) -> None:
        self._python, self._folder, self._base_url, self._runs = python, folder, f"http://127.0.0.1:{port}", 0
        (folder / "logs").mkdir()
        command = [
            str(python),
            "-m",
            "tensorboard.main",
            "--logdir",
            str(folder / "logs"),
            "--port",
            str(port),
            "--reload_interval",
            "1",
        ]
        self._server = Server(self.name, command, self._base_url, folder, {})
        self._server.wait_for(lambda: self._server.http.get("/").is_success, "its start")

    def stored_bytes(self) -> int:
        """Size of its event files."""
        return sum(file.stat().st_size for file in (self._folder / "logs").rglob("events.*"))

    def keep(self, runs: Sequence[Columns]) -> list[str]:
        """Write event files; returns when it has read them."""
        self._runs += len(runs)
        names = [f"run-{self._runs - n}" for n in range(len(runs))]
        script = [str(self._python), "-P", str(Path(__file__).with_name("tensorboard_peer.py")), str(self._folder / "logs")]
        keep_arrays(script, self._folder / "kept.npz", names, runs, {})
        self._server.wait_for(lambda: self._has_read(names, runs), "reading its files", READS_WITHIN_S)
        return names

    def overview(self, run: str, key: str) -> list[float]:
        """Its sample of the series: 1,000 points, chosen at random."""
        return [point["value"] for point in self._series(key)[run]]

    def compare(self, runs: Sequence[str], key: str) -> int:
        """A metric of all runs, as its page requests it."""
        answer = self._ask(key)
        assert set(runs) <= set(answer.json()[0]["runToSeries"])
        return int(answer.num_bytes_downloaded)

    def page(self, run: str) -> tuple[str, str]:
        """All charts."""
        return f"{self._base_url}/#timeseries", "line-chart canvas"

    def screen(self, run: str) -> tuple[str, str]:
        """All charts."""
        return f"{self._base_url}/#timeseries", SCREEN

    def compare_page(self, runs: Sequence[str], key: str) -> tuple[str, str]:
        """The charts of one metric, with all runs that it has."""
        return f"{self._base_url}/?tagFilter={quote(key)}#timeseries", SCREEN

    def close(self) -> None:
        """End its server."""
        self._server.close()

    def _has_read(self, names: Sequence[str], runs: Sequence[Columns]) -> bool:
        pairs = [(name, key, len(values)) for name, run in zip(names, runs, strict=True) for key, values in run.items()]
        return all(self._last_step(name, key) == last for name, key, last in pairs)

    def _last_step(self, run: str, key: str) -> int:
        tags = self._server.get(TAGS).json()["scalars"]["runTagInfo"]
        if key not in tags.get(run, ()):
            return 0
        return int(self._series(key)[run][-1]["step"])

    def _series(self, key: str) -> dict[str, list[dict[str, Any]]]:
        response: dict[str, list[dict[str, Any]]] = self._ask(key).json()[0]["runToSeries"]
        return response

    def _ask(self, key: str) -> Any:
        return self._server.post(SERIES, data={"requests": json.dumps([{"plugin": "scalars", "tag": key}])})
