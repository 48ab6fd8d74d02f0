"""The compose file's own commands, started by hand against real servers: what production does, without Docker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from ruamel.yaml import YAML

from oppo_contract.lifeline import Lifeline
from oppo_platform.embedded.ports import saved_port

pytestmark = pytest.mark.timeout(600)
COMPOSE = Path(__file__).parents[2] / "docker-compose.yml"


@contextmanager
def service(command: list[str], environ: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One service until the end of the block, then stopped as a container is: by SIGTERM."""
    with Lifeline() as lifeline, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "oppo_cli", *command[1:]], env=lifeline.environ(environ), pass_fds=(lifeline.fd,),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        yield process
        process.terminate()
        process.wait()


BEHIND = ("scheduler", "housekeeper")


def platform_environ(folder: Path, url: str) -> dict[str, str]:
    """What the platform's services read, but for the servers."""
    return {
        **os.environ, "OPPO_HOME": str(folder / "platform"), "OPPO_BASE_URL": url, "OPPO_SECRET_KEY": "k" * 64,
        "OPPO_ARTIFACT_ROOT": (folder / "artifacts").as_uri(), "DJANGO_SETTINGS_MODULE": "oppo_platform.settings",
    }  # fmt: skip


def test_the_services_work_together(tmp_path: Path, database_url: str, redis_url: str, tools: Any) -> None:
    services = YAML(typ="safe", pure=True).load(COMPOSE.read_text())["services"]
    port = str(saved_port(tmp_path, "web"))
    prompts = tmp_path / "models" / "tiny" / "prompts.jsonl"
    prompts.parent.mkdir(parents=True)
    prompts.write_text(json.dumps({"prompt": "note sea"}) + "\n")

    def command(name: str) -> list[str]:
        own = {"8000": port, "0.0.0.0": "127.0.0.1", "/models": str(tmp_path / "models")}
        return [own.get(word, word) for word in services[name]["command"]]

    url = f"http://127.0.0.1:{port}"
    environ = platform_environ(tmp_path, url) | {"DATABASE_URL": own_database(database_url), "REDIS_URL": redis_url}

    def oppo(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "oppo_cli", *arguments], env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    oppo(*command("migrate")[1:])
    oppo("admin", "create", "ann")
    worker_environ = {
        "OPPO_HOME": str(tmp_path / "worker"), "OPPO_PLATFORM_URL": url, "OPPO_JOIN_TOKEN": oppo("admin", "join-token"),
        "OPPO_NODE_NAME": "by-hand", "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with ExitStack() as running:
        web = running.enter_context(service(command("web"), environ, tmp_path / "web.log"))
        for name in BEHIND:
            running.enter_context(service(command(name), environ, tmp_path / f"{name}.log"))
        tools.eventually(lambda: healthy(url) or web.poll() is not None, "web")
        running.enter_context(service(command("worker"), worker_environ, tmp_path / "worker.log"))
        run = trained(url, oppo("admin", "token", "ann"), tools)
        assert run["state"] == "succeeded", run
        for name in BEHIND:
            assert "ago" in oppo(*services[name]["healthcheck"]["test"][2:])
    assert (tmp_path / "worker" / "worker" / "node.json").stat().st_mode & 0o077 == 0
    assert (tmp_path / "artifacts" / "runs" / str(run["id"]) / "checkpoints").is_dir()


class Parts:
    """Web, scheduler and worker on servers of the test's, each to be started and stopped on its own."""

    def __init__(self, folder: Path, database: str, redis_url: str, tools: Any) -> None:
        self.folder, self.database, self.tools = folder, database, tools
        self.port = str(saved_port(folder, "web"))
        self.url = f"http://127.0.0.1:{self.port}"
        self.environ = platform_environ(folder, self.url) | {"DATABASE_URL": database, "REDIS_URL": redis_url}
        prompts = folder / "models" / "tiny" / "prompts.jsonl"
        prompts.parent.mkdir(parents=True)
        prompts.write_text(json.dumps({"prompt": "note sea"}) + "\n")
        self.oppo("migrate")
        self.oppo("admin", "create", "ann")
        self.token, self.join_token = self.oppo("admin", "token", "ann"), self.oppo("admin", "join-token")

    def oppo(self, *arguments: str) -> str:
        """One command of the platform's."""
        command = [sys.executable, "-m", "oppo_cli", *arguments]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, check=True).stdout.strip()

    @contextmanager
    def platform(self) -> Iterator[httpx.Client]:
        """Web and scheduler, and a client of ann's."""
        with (
            service(["oppo", "web", "--port", self.port], self.environ, self.folder / "web.log"),
            service(["oppo", "scheduler"], self.environ, self.folder / "scheduler.log"),
            httpx.Client(base_url=f"{self.url}/api/v1/", headers={"Authorization": f"Bearer {self.token}"}, timeout=20) as http,
        ):
            self.tools.eventually(lambda: healthy(self.url), "web")
            yield http

    def worker(self) -> Any:
        """A node that joins by itself."""
        environ = {
            "OPPO_HOME": str(self.folder / "worker"), "OPPO_PLATFORM_URL": self.url, "OPPO_JOIN_TOKEN": self.join_token,
            "OPPO_NODE_NAME": "by-hand", "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = ["oppo", "worker", "run", "--models-root", str(self.folder / "models")]
        return service(command, environ, self.folder / "worker.log")


@pytest.mark.full
def test_a_worker_that_trains_lives_through_a_restore(tmp_path: Path, database_url: str, redis_url: str, tools: Any) -> None:
    parts, steps = Parts(tmp_path, own_database(database_url), redis_url, tools), 250
    spec = tools.tiny_spec("outlives it", steps=steps, checkpoints={"every_steps": 5, "keep": 1})
    with ExitStack() as running:
        with parts.platform() as http:
            running.enter_context(parts.worker())
            run_id = tools.eventually(lambda: http.post("runs", json={"spec": spec}).json().get("id"))
            tools.eventually(lambda: http.get(f"runs/{run_id}").json()["step"] >= 8)
            parts.oppo("backup", str(tmp_path / "b.tar"))
            at = http.get(f"runs/{run_id}").json()["step"]
            tools.eventually(lambda: http.get(f"runs/{run_id}").json()["step"] >= at + 10)
        parts.oppo("restore", "--replace", str(tmp_path / "b.tar"))  # the worker trains on meanwhile
        with parts.platform() as http:
            run = tools.eventually(lambda: r if (r := http.get(f"runs/{run_id}").json())["state"] in tools.ENDED else None)
            key = "critic/score/mean"
            told = http.get(f"runs/{run_id}/metrics", params={"keys": key, "max_points": 20000}).json()["series"][key]["step"]
    assert run["state"] == "succeeded", run
    assert told == list(range(1, steps + 1))
    with psycopg.connect(parts.database) as connection:
        question = "SELECT id, epoch, state, outcome, start_step FROM runs_attempt ORDER BY id"
        (_, *first), (number, *second) = connection.execute(question).fetchall()
    assert first == [1, "fenced", "restored", 0]
    assert number > 1_000_000
    assert second[:3] == [2, "ended", "succeeded"]
    assert second[3] >= 5, "from a checkpoint"


def trained(url: str, token: str, tools: Any) -> dict[str, Any]:
    """A run that went through, over the API."""
    with httpx.Client(base_url=f"{url}/api/v1/", headers={"Authorization": f"Bearer {token}"}, timeout=20) as http:
        run_id = tools.eventually(lambda: http.post("runs", json={"spec": tools.tiny_spec("by hand")}).json().get("id"))
        return tools.eventually(lambda: run if (run := http.get(f"runs/{run_id}").json())["state"] in tools.ENDED else None)


def own_database(database_url: str) -> str:
    """A fresh database on the session's server."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("drop database if exists by_hand with (force)")
        connection.execute("create database by_hand")
    return database_url.rpartition("/")[0] + "/by_hand"


def healthy(url: str) -> bool:
    """Whether the pages answer."""
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False
