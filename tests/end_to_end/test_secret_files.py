"""The value of a team's secret is in no file that the platform or a run leaves: data, logs, checkpoints, exports, backups."""

from __future__ import annotations

import base64
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from oppo_platform.embedded import PostgresServer

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]
VALUE = "hf_a-canary-of-the-team"
SET_SECRET = """
from oppo_platform.accounts.models import Team, User
from oppo_platform.accounts.team_secrets import set_secret
set_secret(User.objects.get(username="admin"), Team.objects.get(), "hub", {value!r})
"""
EXPORTS = ("spec.yaml", "spec.py", "logs.txt", "metrics.ndjson?keys=critic/score/mean", "trace.json?from_step=1&to_step=40")


def files_below(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        for parent, _, names in os.walk(folder):
            yield from (path for name in names if (path := Path(parent, name)).is_file() and not path.is_symlink())


def has_value(content: bytes) -> bool:
    plain = VALUE.encode()
    return any(form in content for form in (plain, base64.b64encode(plain).rstrip(b"="), plain.hex().encode()))


def test_no_file_has_the_value_of_a_secret(home: Path, tmp_path: Path, tools) -> None:
    with tools.running_platform(home) as platform:
        done = tools.oppo(home, "manage", "shell", "-c", SET_SECRET.format(value=VALUE))
        assert done.returncode == 0, done.stderr
        forked = platform.submit(tools.tiny_spec("forked", steps=8, secrets={"HF_TOKEN": "secret:hub"}))
        assert platform.wait_for_end(forked)["state"] == "succeeded"
        # A variable that torch may read needs a new process, whose environment can be looked at from outside.
        run_id = platform.submit(tools.tiny_spec("with a secret", steps=200, secrets={"TORCH_TOKEN": "secret:hub"}))
        platform.wait_for_step(run_id, 6)
        assert VALUE in {process.environ().get("TORCH_TOKEN") for process in platform.find("oppo_core")}, "its engine has it"
        for name, options in {"a": (), "b": ("--with-checkpoints", "--with-keys")}.items():
            assert tools.oppo(home, "backup", *options, str(tmp_path / f"{name}.tar")).returncode == 0
        assert platform.wait_for_end(run_id)["state"] == "succeeded"
        for name in EXPORTS:
            reply = platform.http.get(f"runs/{run_id}/{name}")
            assert reply.status_code == 200, (name, reply.text)
            (tmp_path / name.partition("?")[0]).write_bytes(reply.content)
        report = tmp_path / "report.tar.gz"
        tools.oppo(home, "doctor", "--bundle", str(report))
        with tarfile.open(report) as bundle:
            bundle.extractall(tmp_path / "report", filter="data")
        database = PostgresServer(home).data
        looked = list(files_below(home, tmp_path, database))
        assert not [str(path) for path in looked if has_value(path.read_bytes())]
    names = {path.name for path in looked}
    assert {"manifest.json", "PG_VERSION", "b.tar", "trace.json", "settings.json"} <= names, names
