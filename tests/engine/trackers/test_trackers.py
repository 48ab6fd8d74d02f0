"""Trackers hold what the journal holds, go on in the same run, and neither slow nor end training, whatever becomes of them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from oppo_core.reporting.event_log import Journal
from oppo_core.trackers import manager
from oppo_core.trackers.config import TrackerConfig
from oppo_core.trackers.manager import TrackerProcess
from oppo_core.trackers.mlflow import NARROW, valid_name
from oppo_core.trackers.validate import HOSTS_VARIABLE
from tests.engine.conftest import merged
from tests.engine.trackers.test_tracker_parts import ODD_NAMES
from tests.engine.trackers.tracker_readers import (
    MlflowReader,
    Reader,
    TensorBoardReader,
    WandbReader,
    check_same,
    free_port,
    mlflow_server,
    python_of_trackers,
    site_packages,
    told_by,
)  # fmt: skip

PATIENT = 240.0  # seconds; the machine may be busy
KINDS = ["tensorboard", *(pytest.param(name, marks=pytest.mark.full) for name in ("mlflow", "wandb"))]
FAST = {"overlap": {"intra_step": "off"}, "checkpoints": {"every_steps": 2, "keep": 9}}


@pytest.fixture(scope="module", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """MLflow and W&B leave temporary files, which belong below pytest's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="session")
def their_python(pytestconfig: pytest.Config) -> Path:
    """An environment with MLflow and W&B, kept from one session to the next."""
    return python_of_trackers(pytestconfig.cache.mkdir("trackers"))


@pytest.fixture
def with_packages(their_python: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Our Python finds their packages, after its own."""
    monkeypatch.setattr(sys, "path", [*sys.path, site_packages(their_python)])
    return their_python


@pytest.fixture(scope="session")
def mlflow(their_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowReader]:
    """A server for all tests."""
    server = mlflow_server(their_python, tmp_path_factory.mktemp("mlflow"), port := free_port())
    try:
        server.wait_for(lambda: server.http.get("/health").is_success, "its start")
        yield MlflowReader(their_python, f"http://127.0.0.1:{port}")
    finally:
        server.close()


@pytest.fixture(params=KINDS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """One tracker after the other."""
    if request.param == "tensorboard":
        return TensorBoardReader()
    python = request.getfixturevalue("with_packages")
    if request.param == "wandb":
        return WandbReader(python)
    found: MlflowReader = request.getfixturevalue("mlflow")
    monkeypatch.setenv(HOSTS_VARIABLE, found.url.removeprefix("http://"))
    return found


def told(section: dict[str, Any], flush_s: float = PATIENT, samples_every: int = 1) -> dict[str, Any]:
    """The part of a spec that switches a tracker on."""
    return {"logging": {"trackers": {**section, "flush_s": flush_s, "samples_every": samples_every}}}


def log_of(events: list[Any]) -> list[str]:
    """All lines of the run's log but those of loading."""
    return [line for event in events if event.kind == "log" for line in event.lines if not line.startswith("Loading ")]


def checkpoint(out: Path, step: int) -> tuple[str, Path]:
    return "--resume-from", out / "checkpoints" / f"step-{step:08d}"


def test_it_has_every_step_of_the_journal_and_the_spec(world: Any, tmp_path: Path, reader: Reader) -> None:
    evaluated = {"evaluation": {"prompts": "echo.jsonl", "every_steps": 2, "count": 2}, "steps": 3}
    status, events = world.main(world.tree(FAST, told(reader.section), evaluated), tmp_path)
    assert (status, log_of(events)[1:]) == (0, [])  # the first line is the evaluation before step 1
    check_same(reader.points(tmp_path), told_by(events), reader.exact)
    shown = "\n".join(reader.texts(tmp_path))
    trained = [row for event in events if event.kind == "samples" for row in event.samples if not row.held_out]
    assert len(trained) == 3
    assert all(row.response.split()[0] in shown for row in trained)
    settings = reader.settings(tmp_path)
    assert (settings["name"], float(settings["ppo.batch_size"]), settings["overlap.intra_step"]) == ("tiny", 6.0, "off")


def test_a_resumed_run_goes_on_in_the_same_one_and_doubles_no_step(world: Any, tmp_path: Path, reader: Reader) -> None:
    """Four steps, then again from the second one on: steps 3 and 4 are trained twice, with other times."""
    _, first = world.main(world.tree(FAST, told(reader.section), {"steps": 4}), tmp_path)
    changed = {"steps": 5, "ppo": {"learning_rate": 1e-3}}
    status, events = world.main(world.tree(FAST, told(reader.section), changed), tmp_path, *checkpoint(tmp_path, 2))
    assert status == 0
    held = told_by(events)
    assert sorted(held) == [1, 2, 3, 4, 5]
    kept = "they replace" if reader.rewrites else "it keeps"
    assert any(f"steps 3 to 4 may be trained again; {kept}" in line for line in log_of(events))
    if not reader.rewrites:
        held |= told_by(first)
    check_same(reader.points(tmp_path), held, reader.exact)


def test_a_run_that_goes_on_where_it_ended_says_nothing_twice(world: Any, tmp_path: Path, reader: Reader) -> None:
    """A budget ends it after step 1, which is told once more then, with the evaluation of the last weights."""
    evaluated = {"steps": 3, "evaluation": {"prompts": "echo.jsonl", "count": 2}}
    tree = world.tree(FAST, told(reader.section), evaluated)
    _, events = world.main(merged(tree, {"budget": {"max_hours": 1e-9}}), tmp_path)
    assert [event.step for event in events if event.kind == "step"] == [1, 1]
    status, events = world.main(tree, tmp_path, *checkpoint(tmp_path, 1))
    assert (status, sorted(told_by(events))) == (0, [1, 2, 3])
    assert not any("again" in line for line in log_of(events))
    points = reader.points(tmp_path)
    if "mlflow" in reader.section:  # it keeps both values of what was told twice, the newer one last
        points = {key: list(dict(found).items()) for key, found in points.items()}
    check_same(points, told_by(events), reader.exact)


def test_a_run_that_is_asked_to_stop_has_told_every_step(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what resumes it goes on there, without a step too many."""
    reader = TensorBoardReader()
    monkeypatch.setattr(manager, "STOPPED_FLUSH_S", PATIENT)
    tree = world.tree(FAST, told(reader.section), {"steps": 4})
    write = Journal.write

    def stop_after_two(journal: Journal, kind: str, at: float | None = None, **payload: Any) -> None:
        write(journal, kind, at, **payload)
        if kind == "step" and payload["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(Journal, "write", stop_after_two):
        status, events = world.main(tree, tmp_path)
    assert (status, events[-1].outcome) == (0, "stopped")
    check_same(reader.points(tmp_path), told_by(events), reader.exact)
    last = sorted((tmp_path / "checkpoints").iterdir())[-1]
    status, events = world.main(tree, tmp_path, "--resume-from", last)
    assert (status, events[-1].outcome, log_of(events)) == (0, "succeeded", [])
    check_same(reader.points(tmp_path), told_by(events), reader.exact)


def deliver_all(config: TrackerConfig, events: list[tuple[str, dict[str, Any]]]) -> None:
    """Send some events of a log, and nothing goes wrong."""
    log = Journal(Path(config.events))
    log.write("started", devices=[], lanes=[], start_step=0, total_steps=9)
    said: list[str] = []
    process = TrackerProcess(config, said.append)
    for kind, payload in events:
        log.write(kind, **payload)
    process.end("succeeded")
    process.wait(time.monotonic() + PATIENT, sum(kind == "step" for kind, _ in events))
    assert said == []


def step(number: int, metrics: dict[str, float]) -> tuple[str, dict[str, Any]]:
    return "step", {"step": number, "elapsed_s": 1.0, "generated_tokens": 2**40, "device_seconds": 1.0, "metrics": metrics}


def test_non_finite_values_are_sent_as_far_as_the_tracker_supports_them(tmp_path: Path, reader: Reader) -> None:
    ((name, settings),) = reader.section.items()
    section = {"username": None, "entity": None, "mode": "offline", "url": None} | settings
    spec = {"name": "odd", "long": "x" * 9000, "many": {f"key-{n}": n for n in range(250)}}
    values = (float("nan"), float("inf"), float("-inf"), 1e-300)
    config = TrackerConfig(name, section, spec, str(tmp_path), str(tmp_path / "events.jsonl"))
    deliver_all(config, [step(number, {"odd:metric/x.y-z": value}) for number, value in enumerate(values, start=1)])
    found = [value for _, value in sorted(reader.points(tmp_path)["odd:metric/x.y-z"])]
    largest = sys.float_info.max if name == "mlflow" else float("inf")  # its database has no infinity
    assert [repr(value) for value in found[:3]] == ["nan", repr(largest), repr(-largest)]
    assert found[3] == (1e-300 if reader.exact else 0.0)
    assert float(reader.settings(tmp_path)["many.key-249"]) == 249


@pytest.mark.full
def test_mlflow_gets_every_metric_whatever_it_is_called(tmp_path: Path, mlflow: MlflowReader, with_packages: Path) -> None:
    told_of = ["critic/score/mean", "busy/cpu:0", *(name for name in ODD_NAMES if re.fullmatch(r"[\w./:-]{1,200}", name))]
    metrics = {name: float(number) for number, name in enumerate(told_of)}
    spec = {"name": "odd", "weights": dict.fromkeys(ODD_NAMES, 1)}
    settings = {"username": None} | mlflow.section["mlflow"]
    deliver_all(TrackerConfig("mlflow", settings, spec, str(tmp_path), str(tmp_path / "events.jsonl")), [step(1, metrics)])
    points = mlflow.points(tmp_path)
    assert {name: points[valid_name(name)] for name in metrics} == {name: [(1, value)] for name, value in metrics.items()}
    params = mlflow.settings(tmp_path)
    assert {params[valid_name(f"weights.{name}")] for name in ODD_NAMES} == {"1"}


# MLflow's own client, at a server that takes no colons, as older ones do.
AT_AN_OLDER_SERVER = """
import json, pathlib, sys
from mlflow import MlflowClient, exceptions
from oppo_core.trackers.config import TrackerConfig
from oppo_core.trackers.cursor import Cursor
from oppo_core.trackers.mlflow import Mlflow
from oppo_core.trackers.protocol import Step
out, settings, log_batch, calls = sys.argv[1], json.loads(sys.argv[2]), MlflowClient.log_batch, []
def older(client, run, metrics=(), params=(), tags=()):
    calls.append(len(metrics))
    if any(":" in each.key for each in [*metrics, *params]) or any(each.key == "void" for each in metrics):
        raise exceptions.MlflowException.invalid_parameter_value("Names may only contain ...")
    log_batch(client, run, metrics=metrics, params=params, tags=tags)
MlflowClient.log_batch = older
cursor = Cursor("old")
tracker = Mlflow(TrackerConfig("mlflow", settings, {"name": "old", "device:0": "x"}, out), cursor, print)
pathlib.Path(out, "trackers").mkdir()
cursor.save(pathlib.Path(out, "trackers", "mlflow.json"))
for number in (1, 2):
    tracker.log_steps([Step(number, 1.0, {"busy/cpu:0": 0.5, "bubble": 0.25})])
try:
    tracker.log_steps([Step(3, 1.0, {"void": 1.0})])
except Exception as error:
    print(type(error).__name__)
print(calls)
"""


@pytest.mark.full
def test_an_older_mlflow_that_takes_no_colons_gets_the_metrics_under_other_names(
    tmp_path: Path, mlflow: MlflowReader, with_packages: Path
) -> None:
    settings = json.dumps({"username": None} | mlflow.section["mlflow"])
    command = [sys.executable, "-c", AT_AN_OLDER_SERVER, str(tmp_path), settings]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENT)
    assert done.stdout.splitlines()[-2:] == ["RefusedError", "[0, 0, 2, 2, 1]"], done.stderr
    names = {name: valid_name(name, NARROW) for name in ("busy/cpu:0", "bubble")}
    assert mlflow.points(tmp_path) == {names["busy/cpu:0"]: [(1, 0.5), (2, 0.5)], "bubble": [(1, 0.25), (2, 0.25)]}
    assert mlflow.settings(tmp_path)[valid_name("device:0", NARROW)] == "x"


class Hung(TrackerProcess):
    """It is stopped as soon as it is there, and hangs for ever."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        os.kill(self.process.pid, signal.SIGSTOP)


def test_one_that_hangs_ends_at_the_deadline_and_what_it_lacks_is_told(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "TrackerProcess", Hung)
    out = tmp_path / "out"
    _, plain = world.main(world.tree(FAST, {"steps": 2}), tmp_path / "plain")
    status, events = world.main(world.tree(FAST, told({"tensorboard": {}}, flush_s=0.2), {"steps": 2}), out)
    assert (status, events[-1].outcome) == (0, "succeeded")
    assert log_of(events) == ["TensorBoard: steps 1 to 2 were not sent: the time limit logging.trackers.flush_s was reached."]
    scores = [[step["critic/score/mean"] for step in told_by(one).values()] for one in (plain, events)]
    assert scores[0] == scores[1]


def test_unsent_steps_are_sent_by_the_next_attempt(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log keeps it: step 2, whose tracker hung from step 1 on."""
    reader = TensorBoardReader()
    write = Journal.write
    started: list[TrackerProcess] = []

    class Seen(TrackerProcess):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

    def hang_after_one(journal: Journal, kind: str, at: float | None = None, **payload: Any) -> None:
        write(journal, kind, at, **payload)
        if kind == "step" and payload["step"] == 1:
            cursor, until = tmp_path / "trackers" / "tensorboard.json", time.monotonic() + PATIENT
            while not cursor.exists() or json.loads(cursor.read_text())["step"] < 1:
                assert time.monotonic() < until
                time.sleep(0.02)
            started[-1].process.send_signal(signal.SIGSTOP)

    tree = world.tree(FAST, told(reader.section), {"steps": 2})
    monkeypatch.setattr(manager, "TrackerProcess", Seen)
    with mock.patch.object(Journal, "write", hang_after_one):
        status, events = world.main(merged(tree, told(reader.section, flush_s=0.2)), tmp_path)
    assert (status, events[-1].outcome) == (0, "succeeded")
    assert "steps 2 to 2 were not sent" in log_of(events)[-1]
    status, events = world.main(merged(tree, {"steps": 3}), tmp_path, *checkpoint(tmp_path, 2))
    assert status == 0
    check_same(reader.points(tmp_path), told_by(events), reader.exact)


def test_one_that_dies_is_told_once_and_training_goes_on(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(TrackerProcess):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.process.kill()
            self._messages.join()

    monkeypatch.setattr(manager, "TrackerProcess", Dead)
    status, events = world.main(world.tree(FAST, told({"tensorboard": {}}), {"steps": 3}), tmp_path)
    assert (status, events[-1].outcome) == (0, "succeeded")
    gone, lost = log_of(events)
    assert gone.startswith("TensorBoard: its process has ended with status -9")
    assert lost.startswith("TensorBoard: steps 1 to 3 were not sent: its process has ended")


def test_a_folder_that_cannot_be_written_is_told_and_costs_no_step(world: Any, tmp_path: Path) -> None:
    (tmp_path / "boards").write_text("a file is in the way")
    status, events = world.main(world.tree(FAST, told(TensorBoardReader.section, flush_s=0.5), {"steps": 1}), tmp_path)
    assert (status, events[-1].outcome) == (0, "succeeded")
    assert "steps 1 to 1 were not sent" in log_of(events)[-1]


def test_the_death_of_the_engine_ends_its_trackers(world: Any, tmp_path: Path) -> None:
    engine = world.start(world.tree(FAST, told({"tensorboard": {}}), {"steps": 1000}), tmp_path)
    engine.step(1)
    children = [child for child in psutil.Process(engine.process.pid).children() if "oppo_core.trackers" in child.cmdline()]
    assert len(children) == 1
    engine.process.kill()
    engine.end()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert (len(gone), alive) == (1, [])


def test_a_trackers_process_imports_no_torch() -> None:
    code = "import sys, oppo_core.trackers.__main__, oppo_core.trackers.tensorboard; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.full
def test_a_server_that_never_answers_costs_no_time(
    world: Any, tmp_path: Path, with_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_server = {"steps": 3}
    listening = socket.create_server(("127.0.0.1", 0))
    place = f"127.0.0.1:{listening.getsockname()[1]}"
    monkeypatch.setenv(HOSTS_VARIABLE, place)
    tree = world.tree(FAST, told({"mlflow": {"uri": f"http://{place}"}}, flush_s=1.0), with_server)
    status, events = world.main(tree, tmp_path)
    assert (status, events[-1].outcome) == (0, "succeeded")
    kinds = [event.kind for event in events if event.kind in ("step", "log")]
    assert kinds == ["log", "step", "step", "step", "log"], "a step that waits for a call would come after its failure"
    assert "steps 1 to 3 were not sent" in log_of(events)[-1]
    listening.close()


@pytest.mark.full
def test_a_server_that_comes_back_gets_everything(
    world: Any, tmp_path: Path, with_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    reader = MlflowReader(with_packages, f"http://127.0.0.1:{port}")
    monkeypatch.setenv(HOSTS_VARIABLE, f"127.0.0.1:{port}")
    out, place = tmp_path / "out", tmp_path / "server"
    place.mkdir()
    ended: list[Any] = []
    tree = world.tree(FAST, told(reader.section), {"steps": 3})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    engine = world.start(tree, out)
    engine.wait_for(lambda event: (event.kind == "log" and "It is retried" in event.lines[0]) or event.kind == "step")
    engine.step(3)
    server = mlflow_server(with_packages, place, port)
    try:
        server.wait_for(lambda: server.http.get("/health").is_success, "its start")
        ended.append(engine.end()[0])
        check_same(reader.points(out), told_by(engine.events), reader.exact)
    finally:
        server.close()
    assert ended == [0]
    said = "\n".join(log_of(engine.events))
    assert said.count("It is retried") == 1
    assert "MLflow: connected again." in said
