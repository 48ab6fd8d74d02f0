"""`oppo up` that is asked to stop while it starts, at each of its stages, and then started again."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from oppo_platform.embedded.ports import saved_port

pytestmark = pytest.mark.timeout(600)
# Words of the command line of what runs in each stage; in the last, web waits for the migrations.
STAGES = ["oppo_cli.bootstrap", "initdb", "postgres -D", "valkey-server", "oppo_cli web", "worker join", "migrations"]
QUICK = {"migrations"}


def start(tools: Any, home: Path, *options: str) -> subprocess.Popen[str]:
    """`oppo up` with its messages."""
    return subprocess.Popen(
        [sys.executable, "-m", "oppo_cli", "up", *options], env=tools.environment(home), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Every process below it."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def has_reached(process: subprocess.Popen[str], words: str, home: Path) -> bool:
    """Whether the stage's process runs."""
    if words == "migrations":
        log = home / "logs" / "web.log"
        return log.exists() and "waiting_for_migrations" in log.read_text()
    for child in descendants(process):
        try:
            if words in " ".join(child.cmdline()):
                return True
        except psutil.NoSuchProcess:
            continue
    assert process.poll() is None, process.communicate()[0]
    return False


@pytest.fixture
def home(tmp_path: Path, tools: Any) -> Iterator[Path]:
    """A home of the test's own."""
    with tools.cleared(tmp_path / "home") as folder:
        folder.mkdir()
        saved_port(folder, "web")  # not 8000, which others on this machine may take at the same time
        yield folder


@pytest.mark.parametrize("stage", [pytest.param(s, marks=[] if s in QUICK else pytest.mark.full) for s in STAGES])
def test_stop_during_the_start_ends_everything_and_the_next_start_succeeds(home: Path, tools: Any, stage: str) -> None:
    process = start(tools, home)
    tools.eventually(lambda: has_reached(process, stage, home), stage)
    below = descendants(process)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate()
    assert "SIGTERM: stopping before the start was complete" in text
    assert "could not be set up" not in text
    assert "Traceback" not in text
    assert process.returncode == 1
    tools.eventually(lambda: not any(child.is_running() for child in below), "every process to end")
    starts_again(tools, home)


def starts_again(tools: Any, home: Path) -> None:
    """The next `oppo up` succeeds."""
    again = start(tools, home)
    line = next(line for line in again.stdout or () if "OPPO runs at" in line or "Error" in line)
    assert "OPPO runs at" in line
    again.send_signal(signal.SIGINT)
    assert again.wait() == 0


@pytest.mark.full
def test_killing_the_start_ends_everything_and_the_next_start_succeeds(home: Path, tools: Any) -> None:
    process = start(tools, home)
    tools.eventually(lambda: has_reached(process, "migrations", home), "the migrations")
    below = descendants(process)
    assert {"oppo_cli.bootstrap", "join"} <= {word for child in below for word in child.cmdline()}
    process.kill()
    process.wait()
    tools.eventually(lambda: not any(child.is_running() for child in below), "every process to end")
    starts_again(tools, home)


def test_port_in_use_is_reported_before_anything_starts(home: Path, tools: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(tools, home, "--port", str(port))
        text, _ = process.communicate()
    assert text == f"Error: Port {port} is used by another program. Start without --port to use a free one.\n"
    assert not list((home / "logs").iterdir())


def test_a_database_that_cannot_be_used_is_reported_with_its_reason(home: Path, tools: Any) -> None:
    free = saved_port(home, "nobody listens here")
    url = f"postgresql://oppo:secret@127.0.0.1:{free}/oppo"
    command = [sys.executable, "-m", "oppo_cli", "up"]
    ended = subprocess.run(command, env=tools.environment(home, DATABASE_URL=url), capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: The database could not be set up (status 1, ")
    assert "Connection refused" in ended.stderr
    assert "secret" not in ended.stderr + (home / "logs" / "start.log").read_text()


def test_a_url_that_cannot_be_parsed_is_reported_without_its_password(home: Path, tools: Any) -> None:
    command = [sys.executable, "-m", "oppo_cli", "up"]
    environ = tools.environment(home, DATABASE_URL="postgresql+psycopg://oppo:secret@127.0.0.1/oppo")
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "DATABASE_URL cannot be parsed" in ended.stderr
    assert "secret" not in ended.stderr + (home / "logs" / "start.log").read_text()
