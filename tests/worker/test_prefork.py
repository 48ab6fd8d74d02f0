"""Fork servers: a fork behaves like a cold start and leaves nothing behind; without a server, starts are cold."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import oppo_core
from tests.processes import gone

HERE = Path(__file__).parent
# `oppo_core` with the small engine in the place of the real one: nothing to import. The fork server is real.
MODULES = {
    "oppo_core/__init__.py": f"__path__.append({str(Path(oppo_core.__file__).parent)!r})",
    "oppo_core/__main__.py": f"""
import os
import sys
sys.path.append({str(HERE)!r})
from small_engine import main
os.environ.setdefault("SET_BY_AN_IMPORT", "1")
def preload():
    pass
if __name__ == "__main__":
    raise SystemExit(main())
""",
}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A folder where `python -m oppo_core` is the small engine."""
    folder = tmp_path / "packages"
    for name, text in MODULES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [str(folder)])
    return {"PYTHONPATH": path, "OPPO_ENGINE_COMMAND": "", "OPPO_SECRET_KEY": "hidden", "HF_HOME": "shown"}


def children(agent: Any) -> list[tuple[psutil.Process, list[str]]]:
    """The agent's running children with their command lines; one may end during the call."""
    found = []
    for process in psutil.Process(agent.pid).children():
        with suppress(psutil.NoSuchProcess):  # a corpse as well
            found.append((process, process.cmdline()))
    return found


def server(agent: Any, package: str) -> psutil.Process | None:
    """The agent's fork server of `worker` or `oppo_core`, once it is ready."""
    ready = (process for process, words in children(agent) if words[2:5] == ["oppo_contract.prefork", package, "ready"])
    return next(ready, None)


@pytest.fixture
def agent(bench: Any, tools: Any, environ: dict[str, str]) -> Any:
    """An agent whose fork servers are ready. They and their forks end with it."""
    agent = bench.start("agent", **environ)
    tools.eventually(lambda: server(agent, "worker") and server(agent, "oppo_core"), "the servers")
    return agent


def is_warm(engine: psutil.Process) -> bool:
    """Whether its guard was forked, not started as a script."""
    parent = engine.parent()
    return parent is not None and "--guard" in parent.cmdline()


def run(bench: Any, tools: Any, number: int, **engine: Any) -> Any:
    """An attempt started by the agent."""
    attempt = bench.attempt(number, **engine)
    bench.platform.launchable = [number]
    return attempt


def test_a_fork_behaves_like_a_start(bench: Any, tools: Any, agent: Any, environ: dict[str, str], tmp_path: Path) -> None:
    said, outcomes = [], []
    for number, start in enumerate((None, None, bench.supervise), start=501):
        how = {"tell": str(tmp_path / f"told-{number}"), "steps": 5, "say": 1}
        if start is None:
            attempt = run(bench, tools, number, **how)
        else:
            attempt = bench.attempt(number, **how)
            start(number, **environ)
        attempt.secrets = {"HF_TOKEN": "secret"}
        tools.eventually(lambda attempt=attempt: attempt.device_was_free, "an outcome, and a free device")
        told = json.loads((tmp_path / f"told-{number}").read_text().replace(f"/{number}", "/N"))
        del told["environ"]["OPPO_LIFELINE_FD"], told["environ"]["PYTEST_CURRENT_TEST"]
        said.append(told)
        logged = [line for event in attempt.kinds("log", "supervisor") for line in event["lines"]]
        outcomes.append((attempt.outcome, attempt.running, logged))
    processes = [(told.pop("pid"), told.pop("session")) for told in said]
    assert said[0] == said[1] == said[2]
    assert len({number for pair in processes for number in pair}) == 6, "each attempt has a process and a session of its own"
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert said[0]["environ"]["HF_TOKEN"] == "secret"
    assert said[0]["environ"]["HF_HOME"] == "shown"
    assert not [name for name in said[0]["environ"] if name.startswith(("OPPO_", "DATABASE_URL"))]


def test_fork_reports_its_exit_status(bench: Any, tools: Any, agent: Any) -> None:
    dies, refuses = bench.attempt(1, die_at=2), bench.attempt(2, exit_code=2)
    bench.platform.launchable = [1, 2]
    tools.eventually(lambda: dies.outcome and refuses.outcome, "two outcomes")
    assert (dies.outcome["outcome"], dies.outcome["exit_code"]) == ("engine_died", 128 + signal.SIGSEGV)
    assert dies.outcome["last_log_lines"] == ["about to die"]
    assert (refuses.outcome["outcome"], refuses.outcome["exit_code"]) == ("failed", 2)
    assert refuses.outcome["last_log_lines"] == ["models.actor.path: no such model"]


def test_an_engine_dies_with_its_forked_supervisor_and_the_next_one_reports(bench: Any, tools: Any, agent: Any) -> None:
    attempt = run(bench, tools, 1, steps=100_000, step_s=0.01, leave_child=True)
    tools.eventually(lambda: len(attempt.kinds("step")) > 3)
    [engine] = [process for process in bench.engines() if "--spec" in process.cmdline()]
    assert is_warm(engine)
    psutil.Process(bench.folder.attempt(1).supervisor_pid()).kill()
    tools.eventually(lambda: attempt.device_was_free, "the next supervisor's report, and a free device")
    assert attempt.outcome["outcome"] == "node_failed"
    assert gone(engine)
    assert bench.platform.requests.count("attempts/1/claim") == 1


@pytest.mark.full
def test_a_killed_guard_takes_its_engine_along(bench: Any, tools: Any, agent: Any) -> None:
    attempt = run(bench, tools, 1, steps=100_000, step_s=0.02)
    tools.eventually(lambda: len(attempt.kinds("step")) > 3)
    bench.engines()[0].parent().kill()
    tools.eventually(lambda: attempt.device_was_free, "an outcome, and a free device")
    assert attempt.outcome["exit_code"] == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_broken_servers_cost_no_attempt(bench: Any, tools: Any, agent: Any, number: int) -> None:
    """A killed server and a hanging server, with an attempt forked from them running."""
    first = run(bench, tools, 1, steps=100_000, step_s=0.02)
    tools.eventually(lambda: first.running, "the first attempt")
    [engine] = bench.engines()
    for kind in ("oppo_core", "worker"):
        server(agent, kind).send_signal(number)
    second = run(bench, tools, 2, steps=5)
    tools.eventually(lambda: second.outcome, "the second attempt")
    assert second.outcome["outcome"] == "succeeded"
    assert bench.platform.requests.count("attempts/2/claim") == 1
    assert bench.engines(1) == [engine]


@pytest.mark.full
def test_only_the_engines_server_hangs(bench: Any, tools: Any, agent: Any) -> None:
    server(agent, "oppo_core").send_signal(signal.SIGSTOP)
    attempt = run(bench, tools, 1, steps=100_000, step_s=0.02)
    tools.eventually(lambda: attempt.running, "a cold start")
    [engine] = bench.engines()
    assert not is_warm(engine)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_servers_end_with_their_agent(bench: Any, tools: Any, agent: Any, number: int) -> None:
    waiting = [server(agent, kind) for kind in ("worker", "oppo_core")]
    waiting[0].send_signal(signal.SIGSTOP)  # also one that hangs
    agent.send_signal(number)
    agent.wait()
    tools.eventually(lambda: all(gone(process) for process in waiting), "the servers to end")


def test_stopping_the_agent_saves_what_was_forked_and_leaves_no_process(bench: Any, tools: Any, agent: Any) -> None:
    attempt = run(bench, tools, 1, steps=100_000, step_s=0.02)
    tools.eventually(lambda: attempt.running)
    below = psutil.Process(agent.pid).children(recursive=True)
    assert len(below) >= 5  # consumer, servers, supervisor, guard, engine; some are children of a server
    agent.terminate()
    assert agent.wait() == 0
    assert attempt.outcome["outcome"] == "preempted"
    tools.eventually(lambda: all(gone(process) for process in below), "every process to end")


@pytest.mark.full
def test_attempts_that_were_forked_may_outlive_the_agent(bench: Any, tools: Any, environ: dict[str, str]) -> None:
    agent = bench.start("agent", "--keep-attempts", **environ)
    tools.eventually(lambda: server(agent, "worker") and server(agent, "oppo_core"), "the servers")
    attempt = run(bench, tools, 1, steps=100_000, step_s=0.02)
    tools.eventually(lambda: attempt.running)
    agent.terminate()
    assert agent.wait() == 0
    steps = len(attempt.kinds("step"))
    tools.eventually(lambda: len(attempt.kinds("step")) > steps, "the engine to go on")
    attempt.signal = "cancel"
    tools.eventually(lambda: attempt.outcome, "an outcome")
    assert attempt.outcome["outcome"] == "cancelled"


@pytest.mark.parametrize("setting", [{"OPPO_WARM": "0"}, {"OPPO_ENGINE_COMMAND": "true"}])
def test_engines_that_need_a_cold_start(bench: Any, tools: Any, environ: dict[str, str], setting: dict[str, str]) -> None:
    agent = bench.start("agent", **{**environ, **setting})
    if "OPPO_WARM" not in setting:
        tools.eventually(lambda: server(agent, "worker"), "the supervisors' server")
    tools.eventually(lambda: len(bench.platform.node_beats) > 1)
    servers = [words[3] for _, words in children(agent) if words[2] == "oppo_contract.prefork"]
    assert servers == (["worker"] if "OPPO_WARM" not in setting else [])


@pytest.mark.full
def test_a_secret_that_python_reads_at_its_start_makes_a_cold_start(bench: Any, tools: Any, agent: Any) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.02)
    attempt.secrets = {"OMP_NUM_THREADS": "3"}
    bench.platform.launchable = [1]
    tools.eventually(lambda: attempt.running)
    [engine] = bench.engines()
    assert not is_warm(engine)
