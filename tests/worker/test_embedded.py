"""Embedded servers and the lifeline: start, password, crash, recovery, cleanup."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from oppo_cli.home import Home
from oppo_cli.stack import Stack
from oppo_contract.lifeline import LIFELINE_LOST, Lifeline, start_guarded
from oppo_platform import embedded
from oppo_platform.embedded.ports import saved_port

OWNER = """
import sys, time
from pathlib import Path
from oppo_platform import embedded
with embedded.postgres(Path(sys.argv[1])) as url, embedded.valkey(Path(sys.argv[1])) as broker:
    print(url, broker, flush=True)
    time.sleep(600)
"""


def eventually(holds: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory):
    """A home whose data is removed at the end (as root it lies outside the home)."""
    folder = tmp_path_factory.mktemp("home")
    yield folder
    for server in (embedded.PostgresServer(folder), embedded.ValkeyServer(folder)):
        server.remove_data()


def test_data_of_another_major_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    server = embedded.PostgresServer(tmp_path)
    server.data.mkdir(parents=True)
    (server.data / "PG_VERSION").write_text("12\n")
    try:
        with pytest.raises(embedded.ServerError, match=r"is of PostgreSQL 12, and this installation brings \d+.*docs/backup.md"):
            server.prepare()
    finally:
        server.remove_data()


def test_data_stays_and_the_port_is_remembered(home: Path) -> None:
    with embedded.postgres(home) as first:
        with psycopg.connect(first) as connection:
            connection.execute("create table kept (n int)")
            connection.execute("insert into kept values (42)")
        pid_file = embedded.PostgresServer(home).data / "postmaster.pid"
        server = psutil.Process(int(pid_file.read_text().split()[0]))
        assert os.geteuid() != 0 or server.uids().effective != 0
    assert not server.is_running()
    with embedded.postgres(home) as again:
        assert again == first
        with psycopg.connect(again) as connection:
            assert connection.execute("select n from kept").fetchall() == [(42,)]


def test_without_the_password_nobody_enters(home: Path) -> None:
    with embedded.postgres(home) as url, pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(url.replace(embedded.PostgresServer(home).password, "wrong"))
    with embedded.valkey(home) as url:
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(url.replace(embedded.ValkeyServer(home).password, "wrong")).ping()
        guards = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
        assert not any(embedded.ValkeyServer(home).password in line for line in guards)
    for file in (home / "secrets").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_data_of_a_deleted_home_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """As root the data lies outside the home and survives it; the new home has another password."""
    with embedded.postgres(tmp_path):
        pass
    server = embedded.PostgresServer(tmp_path)
    try:
        shutil.rmtree(tmp_path / "secrets")
        with (
            pytest.raises(embedded.ServerError, match=r"another password.*delete .*postgres to begin"),
            embedded.postgres(tmp_path),
        ):
            pass
        assert server.data.exists()
    finally:
        server.remove_data()


def names_of(processes: list[psutil.Process]) -> set[str]:
    """Names of remaining processes: PostgreSQL's workers come and go."""
    names = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.add(process.name())
    return names


def test_kill_of_the_owner_leaves_no_orphan_and_the_next_start_recovers(home: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(home)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        url = owner.stdout.readline().split()[0]
        with psycopg.connect(url) as connection:
            connection.execute("create table if not exists survived (n int)")
            connection.execute("insert into survived values (7)")
        below = psutil.Process(owner.pid).children(recursive=True)
        assert names_of(below) >= {"postgres", "valkey-server"}
    finally:  # also when it failed: the next tests want the same folder
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    _gone, alive = psutil.wait_procs(below, timeout=60)
    assert not alive
    with embedded.postgres(home) as again, psycopg.connect(again) as connection:
        assert connection.execute("select n from survived").fetchall() == [(7,)]


def test_postgres_recovers_from_its_own_kill(home: Path) -> None:
    server = embedded.PostgresServer(home)
    with Lifeline() as lifeline:
        server.start(lifeline.fd)
        server.wait_until_ready()
        with psycopg.connect(server.url) as connection:
            connection.execute("create table if not exists crashed (n int)")
            connection.execute("insert into crashed values (1)")
        pid = int((server.data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)
        server.process.wait()
        assert (server.data / "postmaster.pid").exists()
        url = server.url
        server.start(lifeline.fd)
        server.wait_until_ready()
        assert server.url == url
        with psycopg.connect(url) as connection:
            assert connection.execute("select count(*) from crashed").fetchone() == (1,)
        server.stop()


def test_a_killed_guard_takes_its_program_along(home: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("the kernel's death signal exists on Linux only")
    with Lifeline() as lifeline:
        guard = start_guarded([sys.executable, "-c", "import time; time.sleep(600)"], lifeline.fd)
        eventually(lambda: len(psutil.Process(guard.pid).children()) == 1)
        child = psutil.Process(guard.pid).children()[0]
        guard.kill()
        guard.wait()
        psutil.wait_procs([child], timeout=30)
        assert not child.is_running()


def test_a_second_server_on_the_same_folder_is_refused(home: Path) -> None:
    with (
        embedded.valkey(home),
        pytest.raises(embedded.ServerError, match="already run by another process"),
        embedded.valkey(home),
    ):
        pass


def test_a_leftover_pid_file_of_somebody_else_is_no_obstacle(home: Path) -> None:
    with embedded.postgres(home):
        pass
    server = embedded.PostgresServer(home)
    (server.data / "postmaster.pid").write_text(f"{os.getpid()}\n{server.data}\n")
    with embedded.postgres(home) as url, psycopg.connect(url) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_a_taken_port_is_replaced(home: Path) -> None:
    port = saved_port(home, "valkey")
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        with embedded.valkey(home) as url:
            assert f":{port}/" not in url


def test_a_port_that_was_asked_for_is_kept(tmp_path: Path) -> None:
    """`oppo up --port 8123`, and the next time `oppo up`: terminals that have logged in find it again."""
    port = saved_port(tmp_path, "somebody")
    with Stack(Home(tmp_path), port=port) as asked:
        assert asked.base_url == f"http://127.0.0.1:{port}"
    with Stack(Home(tmp_path)) as later:
        assert later.base_url == asked.base_url


def test_a_throwaway_server_leaves_nothing(tmp_path: Path) -> None:
    with embedded.postgres(tmp_path, throwaway=True):
        data = embedded.PostgresServer(tmp_path).data
        assert data.exists()
    assert not data.exists()


@pytest.mark.parametrize("command", [["sh", "-c", "exit 7"], ["no-such-program"], ["sh", "-c", "kill -9 $$"]])
def test_the_guard_ends_with_the_programs_status(command: list[str]) -> None:
    with Lifeline() as lifeline:
        status = start_guarded(command, lifeline.fd, output=subprocess.DEVNULL).wait()
    assert status == {"exit 7": 7, "no-such-program": 127, "kill -9 $$": 137}[command[-1]]


def test_a_program_that_ignores_the_stop_signal_is_killed() -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    with Lifeline() as lifeline:
        guard = start_guarded([sys.executable, "-c", stubborn], lifeline.fd, grace_s=0.2, output=subprocess.PIPE)
        assert guard.stdout is not None
        guard.stdout.readline()
        lifeline.close()
        assert guard.wait() == 137


def test_programs_end_when_the_lifeline_is_closed() -> None:
    program = (
        "import time; from oppo_contract.lifeline import watch_lifeline; watch_lifeline(); print(1, flush=True); time.sleep(600)"
    )
    with Lifeline() as lifeline:
        child = subprocess.Popen(
            [sys.executable, "-c", program], env=lifeline.environ(), pass_fds=[lifeline.fd], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        lifeline.close()
        assert child.wait() == LIFELINE_LOST
