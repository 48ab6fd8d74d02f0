"""What trackers hold after a run, read by their own readers: TensorBoard's accumulator, MLflow's server, W&B's records.

MLflow and W&B are not among our packages: they get an environment of their own, which is made for `make test-full`.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from oppo_bench.peer_environment import Packages, ensure_environment
from oppo_bench.telemetry.peer_trackers.tracker import Server
from oppo_contract.events import Event

# As in pyproject.toml, but for the whole of MLflow: its server is the peer.
PACKAGES = Packages("trackers", ("mlflow==3.17.2", "wandb==0.31.0"))
Points = dict[str, list[tuple[int, float]]]  # metric → (step, value), in the order in which the tracker gives them


class Reader(Protocol):
    """One tracker. `section`: its place in the spec; `exact`: it keeps all 64 bits; `rewrites`: see `Sink`."""

    section: dict[str, Any]
    exact: bool
    rewrites: bool

    def points(self, out: Path) -> Points:
        """Every point of the run in `out`; fails if there are several runs."""

    def texts(self, out: Path) -> list[str]:
        """All answers, however they are stored."""

    def settings(self, out: Path) -> dict[str, str]:
        """The spec as it stands there, flat."""


class TensorBoardReader:
    """Event files, by TensorBoard's own accumulator."""

    section = {"tensorboard": {"folder": "boards/one"}}
    exact, rewrites = False, True

    def _read(self, out: Path) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(out / "boards" / "one"), size_guidance={"scalars": 0, "tensors": 0})
        found.Reload()
        return found

    def points(self, out: Path) -> Points:
        read = self._read(out)
        return {tag: [(point.step, point.value) for point in read.Scalars(tag)] for tag in read.Tags()["scalars"]}

    def texts(self, out: Path) -> list[str]:
        return [point.tensor_proto.string_val[0].decode() for point in self._read(out).Tensors("samples/text_summary")]

    def settings(self, out: Path) -> dict[str, str]:
        from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

        data = self._read(out).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        values = parse_session_start_info_plugin_data(data).hparams
        return {key: str(getattr(value, value.WhichOneof("kind"))) for key, value in values.items()}


@dataclass
class MlflowReader:
    """A server with SQLite, by MLflow's client in its own environment."""

    python: Path
    url: str
    exact, rewrites = True, False

    @property
    def section(self) -> dict[str, Any]:
        return {"mlflow": {"uri": self.url, "experiment": "contract"}}

    def _ask(self, out: Path) -> dict[str, Any]:
        run = json.loads((out / "trackers" / "mlflow.json").read_text())["run"]
        asked = [str(self.python), "-c", MLFLOW_SAYS, self.url, run]
        told: dict[str, Any] = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
        return told

    def points(self, out: Path) -> Points:
        told = self._ask(out)["points"]
        return {key: [(step, float(value)) for step, value in points] for key, points in told.items()}

    def texts(self, out: Path) -> list[str]:
        return list(self._ask(out)["texts"])

    def settings(self, out: Path) -> dict[str, str]:
        return dict(self._ask(out)["params"])


MLFLOW_SAYS = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
experiment = client.get_experiment_by_name("contract").experiment_id
[run] = client.search_runs([experiment], f"tags.`oppo.run` = '{sys.argv[2]}'")
id = run.info.run_id
def points_of(key):
    found = sorted(client.get_metric_history(id, key), key=lambda point: (point.step, point.timestamp))
    return [(point.step, str(point.value)) for point in found]
points = {key: points_of(key) for key in run.data.metrics}
texts = [open(client.download_artifacts(id, file.path)).read() for file in client.list_artifacts(id, "samples")]
print(json.dumps({"points": points, "texts": texts, "params": run.data.params, "status": run.info.status}))
"""


@dataclass
class WandbReader:
    """The files of offline runs: records of W&B's protocol buffers in a LevelDB log."""

    python: Path
    section = {"wandb": {"project": "contract"}}
    exact, rewrites = True, False

    def _ask(self, out: Path) -> dict[str, Any]:
        asked = [str(self.python), "-c", WANDB_SAYS, *map(str, sorted((out / "wandb").glob("offline-run-*")))]
        told: dict[str, Any] = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
        assert set(told["runs"]) == {json.loads((out / "trackers" / "wandb.json").read_text())["run"]}
        return told

    def points(self, out: Path) -> Points:
        points: Points = defaultdict(list)
        for step, row in self._ask(out)["rows"]:
            for key, value in row.items():
                if not key.startswith(("_", "samples.", "held_out.")):  # its own, and tables
                    points[key].append((step, float(value)))
        return points

    def texts(self, out: Path) -> list[str]:
        return [file.read_text() for file in (out / "wandb").glob("offline-run-*/files/media/table/*samples*")]

    def settings(self, out: Path) -> dict[str, str]:
        from oppo_core.trackers.config import flatten

        return {key: str(value) for key, value in flatten(self._ask(out)["config"]).items()}


# A LevelDB log: 7 bytes of header, then blocks of 32 KiB with parts of records: (checksum, length, kind), 1 and 4 end one.
WANDB_SAYS = """
import glob, json, struct, sys
from wandb.proto import wandb_internal_pb2 as pb
def records(path):
    data, at, whole = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at:at + 7])
        whole, at = whole + data[at + 7:at + 7 + length], at + 7 + length
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""
runs, rows, config = [], [], {}
for folder in sys.argv[1:]:
    for record in records(*glob.glob(folder + "/*.wandb")):
        if record.WhichOneof("record_type") == "run":
            runs.append(record.run.run_id)
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif record.WhichOneof("record_type") == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append((record.history.step.num, row))
print(json.dumps({"runs": runs, "rows": rows, "config": config}))
"""


def python_of_trackers(folder: Path) -> Path:
    """The interpreter of their environment, which is made in `folder` if it is not there, by one process alone."""
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return ensure_environment(folder, PACKAGES, print)


def site_packages(python: Path) -> str:
    """Where its packages lie."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(python.parent.parent / "lib" / version / "site-packages")


def mlflow_server(python: Path, folder: Path, port: int) -> Server:
    """A server with a database and artifacts in `folder`; it may not answer yet."""
    command = [
        str(python), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    environment = {"PATH": os.environ["PATH"], "MLFLOW_DISABLE_TELEMETRY": "true"}
    return Server("MLflow", command, f"http://127.0.0.1:{port}", folder, environment)


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def told_by(events: list[Event]) -> dict[int, dict[str, float]]:
    """Step → all that the journal says of it; a step that is told again adds to it or replaces it."""
    told: dict[int, dict[str, float]] = {}
    for event in events:
        if event.kind == "step":
            axes = {axis: float(getattr(event, axis)) for axis in ("elapsed_s", "generated_tokens", "device_seconds")}
            told[event.step] = event.metrics | axes
    return told


def check_same(points: Points, told: dict[int, dict[str, float]], exact: bool) -> None:
    """Every metric of every step stands there once, with its value, and nothing else does."""
    assert set(points) == {key for metrics in told.values() for key in metrics}
    for key, found in points.items():
        expected = [(step, metrics[key]) for step, metrics in sorted(told.items()) if key in metrics]
        assert [step for step, _ in sorted(found)] == [step for step, _ in expected], key
        for (_, value), (_, wanted) in zip(sorted(found), expected, strict=True):
            shown = wanted if exact else float(np.float32(wanted))
            assert value == shown or (math.isnan(value) and math.isnan(shown)), (key, value, shown)
