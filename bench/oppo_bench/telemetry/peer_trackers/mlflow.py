"""MLflow's server with PostgreSQL, through its REST API, which costs less than its client."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import psycopg

from oppo_bench.telemetry import load as load
from oppo_bench.telemetry.peer_trackers.tracker import Columns, Server

API, PAGES, TRACES = "/api/2.0/mlflow", "/ajax-api/2.0/mlflow", "/ajax-api/3.0/mlflow"
REWARD_TAG = "reward"
TRACE_COLUMNS = "request_id, experiment_id, timestamp_ms, execution_time_ms, status, request_preview, response_preview"
POINTS_A_CALL = 1000  # limit of log-batch
SHOWN = 320  # points of a series that its page requests
EXPERIMENT = "0"
METRICS = ("metrics", "latest_metrics")
CURVE = ".main-svg .scatterlayer path.js-line"
# The number of cards in the window, once each has its curve.
SCREEN = f"""() => {{
  const cards = [...document.querySelectorAll("[data-testid='experiment-view-compare-runs-card']")].filter((card) => {{
    const {{ top, bottom, height }} = card.getBoundingClientRect();
    return height && bottom > 0 && top < innerHeight;
  }});
  return cards.every((card) => card.querySelector("{CURVE}")) && cards.length;
}}"""


class Mlflow:
    """MLflow as a tracker of the benchmark."""

    name = "MLflow"
    can = frozenset({"ingest", "overview", "zoom", "compare", "table", "page", "screen", "compare_page", "samples"})

    def __init__(self, python: Path, database_url: str, port: int, folder: Path) -> None:
        self._database, self._base_url = database_url, f"http://127.0.0.1:{port}"
        store = database_url.replace("postgresql://", "postgresql+psycopg2://", 1)
        command = [
            str(python), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--backend-store-uri", store,
            "--artifacts-destination", str(folder / "artifacts"),
        ]  # fmt: skip
        path = f"{python.parent}:/usr/bin:/bin"
        self._server = Server(self.name, command, self._base_url, folder, {"PATH": path, "MLFLOW_DISABLE_TELEMETRY": "true"})
        self._server.wait_for(lambda: self._server.http.get("/health").is_success, "its start")

    def ingest(self, columns: Columns) -> float:
        """Batches of 1,000 points, its limit, one after the other, over one connection."""
        [length] = {len(values) for values in columns.values()}
        run, columns_sent = self.create_run(), {key: values.tolist() for key, values in columns.items()}
        steps = POINTS_A_CALL // len(columns_sent)
        start = time.perf_counter()
        for first in range(1, length + 1, steps):
            points = [
                {"key": key, "value": values[step - 1], "timestamp": 1000 * step, "step": step}
                for step in range(first, min(first + steps, length + 1))
                for key, values in columns_sent.items()
            ]
            self._server.post(f"{API}/runs/log-batch", json={"run_id": run, "metrics": points})
        for key in columns_sent:
            shown = self._history([run], key)
            assert shown[-1]["step"] == length, "an ingested point cannot be read"
        return time.perf_counter() - start

    def stored_bytes(self) -> int:
        """Size of the metrics' tables, vacuumed."""
        with psycopg.connect(self._database, autocommit=True) as connection:
            for table in METRICS:
                connection.execute(f"VACUUM FULL {table}")
            sizes = connection.execute(
                "SELECT sum(pg_total_relation_size(name::regclass)) FROM unnest(%s::text[]) AS name", [list(METRICS)]
            )
            return int(sizes.fetchone()[0])  # type: ignore[index]

    def keep(self, runs: Sequence[Columns]) -> list[str]:
        """By COPY into its own tables."""
        names = [self.create_run() for _ in runs]
        with psycopg.connect(self._database) as connection:
            with connection.cursor().copy("COPY metrics (key, value, timestamp, run_uuid, step, is_nan) FROM STDIN") as copy:
                for name, columns in zip(names, runs, strict=True):
                    for key, values in columns.items():
                        for step, value in enumerate(values.tolist(), start=1):
                            copy.write_row((key, value, 1000 * step, name, step, False))
            rows = [
                (key, float(values[-1]), 1000 * len(values), name, len(values), False)
                for name, columns in zip(names, runs, strict=True)
                for key, values in columns.items()
            ]
            self._copy_latest(connection, rows)
        with psycopg.connect(self._database, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE metrics")
        return names

    def overview(self, run: str, key: str) -> list[float]:
        """As its page: 320 points."""
        return [point["value"] for point in self._history([run], key)]

    def zoom(self, run: str, key: str, first: int, last: int) -> None:
        """As its page."""
        self._history([run], key, start_step=first, end_step=last)

    def compare(self, runs: Sequence[str], key: str) -> int:
        """All runs in one request, which takes up to 100."""
        asked = {"run_ids": list(runs), "metric_key": key, "max_results": SHOWN}
        answer = self._server.get(f"{PAGES}/metrics/get-history-bulk-interval", **asked)
        assert len({point["run_id"] for point in answer.json()["metrics"]}) == len(runs)
        return answer.num_bytes_downloaded

    def list_runs(self, count: int, keys: Sequence[str]) -> None:
        """Rows like its own."""
        model, names = self.create_run(), [uuid4().hex for _ in range(count)]
        with psycopg.connect(self._database) as connection:
            found = connection.execute("SELECT column_name FROM information_schema.columns WHERE table_name = 'runs'")
            copied = ", ".join(sorted({name for (name,) in found} - {"run_uuid"}))
            connection.execute(
                f"INSERT INTO runs (run_uuid, {copied}) SELECT new_uuid, {copied} FROM runs, unnest(%s::text[]) AS new_uuid"
                " WHERE run_uuid = %s",
                [names, model],
            )
            rows = [(key, float(hash((name, key)) % 10_007), 1000, name, 1, False) for name in names for key in keys]
            self._copy_latest(connection, rows)
        with psycopg.connect(self._database, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE runs, latest_metrics")

    def table(self, key: str, rows: int) -> None:
        """Its search, sorted by a metric."""
        asked = {"experiment_ids": [EXPERIMENT], "order_by": [f"metrics.`{key}` DESC"], "max_results": rows}
        answer = self._server.post(f"{API}/runs/search", json=asked)
        assert len(answer.json()["runs"]) == rows

    def page(self, run: str) -> tuple[str, str]:
        """The charts of a run."""
        address = f"{self._base_url}/#/experiments/{EXPERIMENT}/runs/{run}/model-metrics"
        return address, CURVE

    def screen(self, run: str) -> tuple[str, str]:
        """The charts of a run."""
        return self.page(run)[0], SCREEN

    def compare_page(self, runs: Sequence[str], key: str) -> tuple[str, str]:
        """Its page of one metric of many runs, which draws two paths for each run, raw and smoothed, in one call of Plotly."""
        asked = {"runs": list(runs), "metric": key, "experiments": [EXPERIMENT], "plot_metric_keys": [key]}
        query = urlencode({name: json.dumps(value) for name, value in asked.items()})
        drawn = f"() => document.querySelectorAll('{CURVE}').length >= {len(runs)}"
        return f"{self._base_url}/#/metric?{query}", drawn

    def keep_samples(self, count: int, seed: int) -> str:
        """As traces of a run, with the reward as a tag, because traces are sorted by tags but not by numbers; by COPY."""
        run = self.create_run()
        made = [(uuid4().hex, sample) for sample in load.random_samples(count, seed)]
        tables: dict[str, Iterable[tuple[Any, ...]]] = {
            f"trace_info ({TRACE_COLUMNS})": (
                (name, int(EXPERIMENT), 1000 + n, 1, "OK", sample["prompt"], sample["response"])
                for n, (name, sample) in enumerate(made)
            ),
            "trace_request_metadata (request_id, key, value)": ((name, "mlflow.sourceRun", run) for name, _ in made),
            "trace_tags (request_id, key, value)": (
                (name, REWARD_TAG, f"{sample['score'] + 100:012.6f}") for name, sample in made
            ),
            "spans (trace_id, experiment_id, span_id, name, status, start_time_unix_nano, end_time_unix_nano, content)": (
                (name, int(EXPERIMENT), name[:16], "sample", "OK", 1, 2,
                 json.dumps({"attributes": {"inputs": sample["prompt"], "outputs": sample["response"]}}))
                for name, sample in made
            ),
        }  # fmt: skip
        with psycopg.connect(self._database) as connection:
            for table, rows in tables.items():
                with connection.cursor().copy(f"COPY {table} FROM STDIN") as copy:
                    for row in rows:
                        copy.write_row(row)
        with psycopg.connect(self._database, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE trace_info, trace_request_metadata, trace_tags, spans")
        return run

    def best_samples(self, run: str, rows: int) -> None:
        """Traces of a run, the highest tag first."""
        assert len(self._traces(f"trace.run_id = '{run}'", rows, [f"tag.{REWARD_TAG} DESC"])) == rows

    def find_samples(self, run: str, words: Sequence[str], rows: int) -> None:
        """Traces of a run with all these words in their texts."""
        found = " AND ".join(f"trace.text ILIKE '%{word}%'" for word in words)
        assert self._traces(f"trace.run_id = '{run}' AND {found}", rows, [])

    def close(self) -> None:
        """End its server."""
        self._server.close()

    def show(self, run: str) -> None:
        """One run with its latest values."""
        self._server.get(f"{API}/runs/get", run_id=run)

    def create_run(self) -> str:
        """The name of a new run."""
        answer = self._server.post(f"{API}/runs/create", json={"experiment_id": EXPERIMENT, "start_time": 1000})
        return str(answer.json()["run"]["info"]["run_id"])

    def _traces(self, wanted: str, rows: int, order_by: list[str]) -> list[dict[str, Any]]:
        places = [{"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": EXPERIMENT}}]
        asked = {"locations": places, "filter": wanted, "max_results": rows, "order_by": order_by}
        found: list[dict[str, Any]] = self._server.post(f"{TRACES}/traces/search", json=asked).json().get("traces", [])
        return found

    def _history(self, runs: Sequence[str], key: str, **more: int) -> list[dict[str, float]]:
        asked = {"run_ids": list(runs), "metric_key": key, "max_results": SHOWN, **more}
        points: list[dict[str, float]] = self._server.get(f"{PAGES}/metrics/get-history-bulk-interval", **asked).json()["metrics"]
        return points

    @staticmethod
    def _copy_latest(connection: psycopg.Connection, rows: Sequence[tuple[str, float, int, str, int, bool]]) -> None:
        columns = "key, value, timestamp, run_uuid, step, is_nan"
        with connection.cursor().copy(f"COPY latest_metrics ({columns}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)


@contextmanager
def mlflow_server(kept: Path, progress: Callable[[str], None]) -> Iterator[Mlflow]:
    """MLflow in its own environment, with a database of its own in the same PostgreSQL. Raises Failure."""
    from oppo_bench.peer_environment import MLFLOW, PeerEnvironmentError, ensure_environment
    from oppo_cli.home import Failure
    from oppo_platform.embedded.ports import saved_port

    url = os.environ["DATABASE_URL"]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE mlflow")
    try:
        python = ensure_environment(kept / MLFLOW.name.lower(), MLFLOW, progress)
    except PeerEnvironmentError as error:
        raise Failure(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="oppo-bench-", ignore_cleanup_errors=True) as folder:
        port = saved_port(Path(os.environ["OPPO_HOME"]), MLFLOW.name)
        server = Mlflow(python, f"{url.rpartition('/')[0]}/mlflow", port, Path(folder))
        try:
            yield server
        finally:
            server.close()
