"""A backup of a platform at work, the loss of what came after, and the same platform again with its run going on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oppo_platform import embedded
from oppo_platform.embedded.ports import saved_port

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]
STEPS = 150


def test_a_platform_is_put_back_and_its_run_goes_on(home: Path, tmp_path: Path, tools) -> None:
    kept = {"every_steps": 5, "keep": 1}
    with tools.running_platform(home) as platform:
        run_id = platform.submit(tools.tiny_spec("backed up", steps=STEPS, checkpoints=kept))
        platform.wait_for_step(run_id, 8)
        made = tools.oppo(home, "backup", str(tmp_path), "--with-checkpoints")
        assert made.returncode == 0, made.stderr
        assert "NOT INCLUDED: the keys" in made.stdout
        [file] = tmp_path.glob("oppo-backup-*.tar")
        refused = tools.oppo(home, "restore", "--replace", str(file))
        assert refused.returncode == 1
        assert "already runs" in refused.stderr
        at_backup = platform.run(run_id)["step"]
        platform.wait_for_step(run_id, at_backup + 8)
        platform.submit(tools.tiny_spec("forgotten"))
    refused = tools.oppo(home, "restore", str(file))
    assert refused.returncode == 2
    assert "has 2 runs, and nothing was changed" in refused.stderr
    shutil.rmtree(home / "artifacts" / "runs" / str(run_id))
    done = tools.oppo(home, "restore", "--replace", str(file))
    assert done.returncode == 0, done.stderr
    assert "1 attempts were running then" in done.stdout
    assert "MISSING" not in done.stdout
    with tools.running_platform(home) as platform:
        run = platform.wait_for_end(run_id)
        assert run["state"] == "succeeded", run["reason"]
        assert platform.steps_of(run_id) == list(range(1, STEPS + 1))
        said = [row["text"] for row in platform.get(f"runs/{run_id}/events", limit=100)["items"]]
        assert any("restored from its backup" in text and "Resumes from step" in text for text in said), said
        later = platform.submit(tools.tiny_spec("after"))
        assert later > 10_000
        assert platform.wait_for_end(later)["state"] == "succeeded"
    listed = tools.oppo(home, "kept-databases")
    aside = listed.stdout.split()
    assert len(aside) == 1, listed
    assert tools.oppo(home, "kept-databases", "--drop", aside[0]).stdout.strip() == "No database is set aside."


def test_a_platform_moves_to_another_home_with_its_keys(home: Path, tmp_path: Path, tools) -> None:
    file, moved = tmp_path / "moved.tar", tmp_path / "moved"
    assert tools.oppo(home, "backup", "--with-keys", str(file)).returncode == 0
    done = tools.oppo(moved, "restore", "--nothing-since", str(file))
    try:
        assert done.returncode == 0, done.stderr
        assert "secret_key is put back" in done.stdout
        assert (moved / "secret_key").read_text() == (home / "secret_key").read_text()
        assert "BackupRefused" not in done.stderr
        checked = tools.oppo(moved, "manage", "check")
        assert checked.returncode == 0, checked.stderr
        assert tools.oppo(moved, "login-link", "admin").returncode == 0
    finally:
        embedded.PostgresServer(moved).remove_data()


OLD_SERVERS = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if int(path.parent.name) < 17]


@contextmanager
def old_server(programs: Path) -> Iterator[str]:
    """A PostgreSQL of an earlier major version, as an account that it accepts."""
    with tempfile.TemporaryDirectory(prefix="oppo-old-") as name:
        folder = Path(name)
        account: dict[str, Any] = {"user": "nobody", "cwd": folder} if os.geteuid() == 0 else {"cwd": folder}
        if os.geteuid() == 0:
            shutil.chown(folder, "nobody")
        port = saved_port(folder, "old")
        data = folder / "data"
        initdb = [programs / "initdb", "-D", data, "-U", "oppo", "-A", "trust", "-E", "UTF8", "--locale=C"]
        subprocess.run(initdb, **account, check=True)
        options = ["-p", str(port), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        with subprocess.Popen([programs / "postgres", "-D", data, *options], **account) as server:
            try:
                url = f"postgresql://oppo@127.0.0.1:{port}"
                ready = [programs / "pg_isready", "-d", f"{url}/postgres"]
                assert_eventually(lambda: subprocess.run(ready, check=False).returncode == 0)
                yield f"{url}/oppo"
            finally:
                server.send_signal(signal.SIGINT)
                server.wait()


def assert_eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.skipif(not OLD_SERVERS, reason="no server of an earlier major version is installed")
def test_a_platform_moves_from_an_older_postgresql_to_the_embedded_one_and_not_back(tmp_path: Path, tools) -> None:
    home, moved = tmp_path / "home", tmp_path / "moved"

    def oppo(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "oppo_cli", *arguments]
        return subprocess.run(command, env=tools.environment(home, DATABASE_URL=url), capture_output=True, text=True, check=False)

    with old_server(OLD_SERVERS[0]) as url:
        with psycopg.connect(url.removesuffix("oppo") + "postgres", autocommit=True) as server:
            server.execute("CREATE DATABASE oppo")
        assert oppo(url, "migrate").returncode == 0
        assert oppo(url, "admin", "create", "maria").returncode == 0
        made = oppo(url, "backup", "--with-keys", str(tmp_path / "old.tar"))
        assert made.returncode == 0, made.stderr
        assert f"pg_dump {OLD_SERVERS[0].parent.name}." in made.stderr
        again = oppo(url, "restore", str(tmp_path / "old.tar"))
        assert again.returncode == 0, again.stderr
        done = tools.oppo(moved, "restore", "--nothing-since", str(tmp_path / "old.tar"))
        try:
            assert done.returncode == 0, done.stderr
            assert "login" in tools.oppo(moved, "login-link", "maria").stdout
            assert tools.oppo(moved, "backup", str(tmp_path / "new.tar")).returncode == 0
        finally:
            embedded.PostgresServer(moved).remove_data()
        back = oppo(url, "restore", "--replace", str(tmp_path / "new.tar"))
        assert back.returncode == 2
        assert f"this server is {OLD_SERVERS[0].parent.name}" in back.stderr
