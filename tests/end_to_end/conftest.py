"""`oppo up` as a user starts it: a process of its own with real servers, and an HTTP client with a user's token."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from oppo_platform.embedded.ports import saved_port

PATIENCE_S = 180.0
ENDED = ("succeeded", "failed", "cancelled")
# Seconds are minutes here: a supervisor that was killed is noticed at once.
QUICK = {"OPPO_ORPHAN_GRACE_S": "3", "OPPO_HOUSEKEEPING_S": "1", "OMP_NUM_THREADS": "1"}


def eventually(holds: Callable[[], Any], what: str = "it", within_s: float = PATIENCE_S) -> Any:
    """The first true value of `holds`, within a deadline that only a hang reaches."""
    deadline = time.monotonic() + within_s
    while True:
        value = holds()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def tiny_spec(name: str, steps: int = 12, **changes: Any) -> dict[str, Any]:
    """A run that takes a second or two: built-in models and a rule."""
    models = {"actor": {"tiny": {"hidden": 16, "layers": 1, "heads": 2, "context": 64, "vocab": 259}}, "critic": "actor"}
    spec = {
        "name": name,
        "steps": steps,
        "models": {**models, "reward": {"rule": "letters:score"}},
        "data": {"prompts": "tiny/prompts.jsonl"},
        "ppo": {"batch_size": 8, "learning_rate": 1e-3},
        "rollout": {"max_new_tokens": 32, "max_prompt_tokens": 16},
        "overlap": {"overcommit": {"initial": 2, "max": 4}, "chunk": {"size": 8}},
        "checkpoints": {"every_steps": 5},
        "retries": {"backoff_s": 0.5},
    }
    return {**spec, **changes}


@dataclass
class Platform:
    """A running `oppo up`."""

    process: subprocess.Popen[str]
    home: Path
    base_url: str
    http: httpx.Client

    def below(self) -> list[psutil.Process]:
        """Every process that it has started, directly or not."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def find(self, *words: str) -> list[psutil.Process]:
        """Those whose command line holds all the words."""
        found = []
        for process in self.below():
            try:
                line = " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if all(word in line for word in words) and "lifeline.py" not in line:
                found.append(process)
        return found

    def get(self, path: str, **params: Any) -> Any:
        """JSON of a GET, asked again while the web process is away."""

        def answer() -> Any:
            try:
                reply = self.http.get(path, params=params)
            except httpx.TransportError:
                return None
            return None if reply.status_code >= 500 else reply

        reply = eventually(answer, f"an answer from {path}")
        assert reply.status_code == 200, reply.text
        return reply.json()

    def submit(self, spec: dict[str, Any]) -> int:
        """Submit a run; the worker may need a moment to report its catalogue."""

        def submitted() -> Any:
            reply = self.http.post("runs", json={"spec": spec})
            assert reply.status_code == 201 or "connected" in reply.text, reply.text
            return reply.json().get("id")

        return int(eventually(submitted, "the run to be accepted"))

    def run(self, run_id: int) -> dict[str, Any]:
        """The run's summary."""
        return self.get(f"runs/{run_id}")

    def wait_for_step(self, run_id: int, step: int) -> dict[str, Any]:
        """Wait until the platform has heard of a step."""

        def there() -> Any:
            run = self.run(run_id)
            assert run["state"] not in ENDED or run["step"] >= step, run
            return run if run["step"] >= step else None

        return eventually(there, f"step {step} of run {run_id}")

    def wait_for_end(self, run_id: int) -> dict[str, Any]:
        """Wait until the run has ended."""
        return eventually(lambda: run if (run := self.run(run_id))["state"] in ENDED else None, f"the end of run {run_id}")

    def steps_of(self, run_id: int) -> list[int]:
        """The steps for which a reward is stored."""
        key = "critic/score/mean"
        return self.get(f"runs/{run_id}/metrics", keys=key, max_points=20000)["series"][key]["step"]


def oppo(home: Path, *arguments: str, code: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Run one `oppo` command to its end; of another checkout, if `code` names its folder."""
    return subprocess.run(
        [sys.executable, "-m", "oppo_cli", *arguments], env=environment(home, code, **more), cwd=code, capture_output=True,
        text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def environment(home: Path, code: Path | None = None, **more: str) -> dict[str, str]:
    """The environment of a user of that home; the test session's own servers are not theirs."""
    hidden = ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE", "OPPO_LIFELINE_FD")
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    # Before the installed packages, which are this checkout's; `python -m` puts the working folder, also `code`, before both.
    packages = {"PYTHONPATH": f"{code / 'platform'}{os.pathsep}{code}"} if code is not None else {}
    return {**kept, **QUICK, **packages, "OPPO_HOME": str(home), **more}


@contextmanager
def running_platform(home: Path, code: Path | None = None, **more: str) -> Iterator[Platform]:
    """`oppo up` of this or another checkout, ready for requests; stopped by Ctrl-C afterwards if it still runs."""
    prompts = home / "models" / "tiny" / "prompts.jsonl"
    prompts.parent.mkdir(parents=True, exist_ok=True)
    prompts.write_text(json.dumps({"prompt": "note sea"}) + "\n")
    # Not 8000, which others on this machine reach for at the same time: a port of its own, from the start.
    saved_port(home, "web")
    output = home / "up.out"
    with output.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "oppo_cli", "up"], env=environment(home, code, **more), cwd=code, stdout=out, stderr=out,
            text=True, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        eventually(lambda: "OPPO runs at" in output.read_text() or process.poll() is not None, "oppo up")
        assert process.poll() is None, output.read_text() + logs(home)
        base_url = output.read_text().partition("OPPO runs at ")[2].split()[0]
        token = oppo(home, "admin", "token", "admin", code=code).stdout.strip()
        with httpx.Client(base_url=f"{base_url}/api/v1/", headers={"Authorization": f"Bearer {token}"}, timeout=20) as http:
            yield Platform(process, home, base_url, http)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()


def logs(home: Path) -> str:
    """The ends of all log files, for a failure's message."""
    files = sorted((home / "logs").glob("*.log"))
    return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


@contextmanager
def running_worker(home: Path, code: Path | None = None, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """`oppo worker run` of a node that has joined, as a process of its own; stopped afterwards if it still runs."""
    command = [sys.executable, "-m", "oppo_cli", "worker", "run"]
    with (home / "worker.out").open("ab") as out:
        process = subprocess.Popen(
            command, env=environment(home, code, **more), cwd=code, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of its own; its servers' data is removed afterwards (as root it lies outside)."""
    with cleared(tmp_path_factory.mktemp("home")) as folder:
        yield folder


@contextmanager
def cleared(folder: Path) -> Iterator[Path]:
    """A home whose servers' data is removed afterwards."""
    from oppo_platform import embedded

    yield folder
    for server in (embedded.PostgresServer(folder), embedded.ValkeyServer(folder)):
        server.remove_data()


@pytest.fixture(scope="module")
def platform(home: Path) -> Iterator[Platform]:
    """One platform for the tests of a module."""
    with running_platform(home) as running:
        yield running


@pytest.fixture(scope="session")
def tools() -> Any:
    """This module's functions, for the tests beside it (which cannot import it)."""
    return sys.modules[__name__]
