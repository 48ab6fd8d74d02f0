"""The whole platform for a benchmark: web, scheduler and workers as processes, on servers that already run."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oppo_cli.home import Failure, Home, without_secrets
from oppo_cli.processes import Child, oppo_command, start_logged
from oppo_cli.stack import Stack

if TYPE_CHECKING:
    from oppo_client import Client

PATIENCE_S = 120.0
LOOK_EVERY_S = 0.01
PROMPTS = "tiny/prompts.jsonl"


def tiny_run(name: str, steps: int) -> dict[str, Any]:
    """A run of the smallest models on one core without overlap, which starts as fast as possible."""
    tiny = {"hidden": 16, "layers": 1, "heads": 2, "context": 64, "vocab": 259}
    return {
        "name": name, "overlap": {"intra_step": "off", "inter_step": "off"}, "steps": steps, "data": {"prompts": PROMPTS},
        "models": {"actor": {"tiny": tiny}, "critic": "actor", "reward": {"rule": "letters:score"}},
        "ppo": {"batch_size": 4}, "rollout": {"max_new_tokens": 16, "max_prompt_tokens": 16},
        "checkpoints": {"every_steps": 1000}, "resources": {"cpu_threads": 1},
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Running:
    """A platform that accepts runs."""

    stack: Stack
    client: Client
    project: int
    join_token: str

    def submit(self, spec: dict[str, Any]) -> int:
        """Submit a run. Raises `OppoError`."""
        return self.client.submit(spec, project=self.project).id

    @staticmethod
    def ended(runs: list[int]) -> int:
        """How many of these runs have ended, from the database."""
        from oppo_contract.states import ENDED
        from oppo_platform.runs.models import Run

        return Run.objects.filter(pk__in=runs, state__in=ENDED).count()


@contextmanager
def running_platform(workers: int, environ: Mapping[str, str]) -> Iterator[Running]:
    """Start the platform in this process's `OPPO_HOME`, with variables for the workers, and wait until every node can accept a
    run."""
    from oppo_cli.platform_commands import set_up_django
    from oppo_client import Client

    home = Home.from_environment()
    prompts = home.models / PROMPTS
    prompts.parent.mkdir(parents=True, exist_ok=True)
    prompts.write_text('{"prompt": "note sea"}\n')
    with home.locked(), Stack(home) as stack:
        stack.environ.update(environ)
        stack.environ["OPPO_LOG_FORMAT"] = "json"
        setup = stack.start()
        os.environ |= {name: stack.environ[name] for name in ("DATABASE_URL", "REDIS_URL")}
        set_up_django()
        for number in range(1, workers):
            add_worker(stack, setup.join_token, f"node-{number}", stack.local_url())
        with Client(stack.local_url(), setup.api_token) as client:
            wait_for(lambda: _reporting() == workers, "every node to report what it has")
            yield Running(stack, client, setup.project, setup.join_token)


def add_worker(stack: Stack, join_token: str, name: str, url: str, more: Mapping[str, str] | None = None) -> Path:
    """Start a worker with a home of its own, which may exist, and with `more` variables; it reaches the platform at `url`.

    Returns its home.
    """
    folder = stack.home.path / name
    folder.mkdir(exist_ok=True)
    environ = {**without_secrets(stack.environ), "OPPO_HOME": str(folder), **(more or {})}
    join = oppo_command("worker", "join", url, "-", "--name", name, "--models-root", str(stack.home.models))
    done = subprocess.run(join, env=environ, input=join_token, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failure(f"A worker could not join.\n{done.stderr[-2000:]}")
    log, command = stack.home.logs / f"{name}.log", oppo_command("worker", "run")
    child = Child(name, lambda: start_logged(command, environ, stack.lifeline.fd, log), log, stop_timeout_s=30.0)
    stack.children.append(child)
    child.launch()
    return folder


def _reporting() -> int:
    """Nodes that have reported their prompts and devices."""
    from oppo_platform.cluster.models import CatalogueItem, Device

    return min(CatalogueItem.objects.values("node").distinct().count(), Device.objects.values("node").distinct().count())


def wait_for(holds: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> Any:
    """Wait for the first true value of `holds`. Raises Failure after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not (value := holds()):
        if time.monotonic() > deadline:
            raise Failure(f"Timed out waiting for {what}.")
        time.sleep(LOOK_EVERY_S)
    return value


def ready_servers(stack: Stack) -> bool:
    """Whether the worker's two fork servers are ready (worker.prefork)."""
    import psutil

    [worker] = [child for child in stack.children if child.name == "worker"]
    assert worker.process is not None
    try:
        lines = [process.cmdline() for process in psutil.Process(worker.process.pid).children()]
    except psutil.Error:  # the process has just ended
        return False
    return sum("oppo_contract.prefork" in line and "ready" in line for line in lines) == 2


def processor_s(parts: Mapping[int, str]) -> dict[str, float]:
    """Processor seconds used so far by this process's children with all of theirs.

    `parts`: the name under which a child counts, by its process id; others count as `servers`.
    """
    import psutil

    used = dict.fromkeys([*parts.values(), "servers"], 0.0)
    for child in psutil.Process().children():
        for process in [child, *child.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.Error:  # the process has just ended
                continue
            used[parts.get(child.pid, "servers")] += times.user + times.system + times.children_user + times.children_system
    return used
