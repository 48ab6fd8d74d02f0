"""The wheel holds everything: from an installation without the checkout somebody logs in and opens a run's page."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import psycopg
import pytest

from oppo_contract import wire
from oppo_contract.lifeline import Lifeline

ROOT = Path(__file__).resolve().parents[2]
ANSWERS_WITHIN_S = 60.0
TINY = {"tiny": {"context": 1024}}
SPEC = {
    "name": "from the wheel",
    "steps": 3,
    "models": {"actor": TINY, "reward": {"model": TINY}},
    "data": {"prompts": "prompts.jsonl"},
}


@dataclass(frozen=True, slots=True)
class Installation:
    """The wheel in a virtual environment of its own, beside the dependencies of this one."""

    python: Path
    home: Path
    environ: dict[str, str]

    def run(self, *command: str) -> str:
        """Output of one of its programs, run far from the checkout."""
        program = self.python.with_name(command[0])
        done = subprocess.run(
            [program, *command[1:]], cwd=self.home, env=self.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("dist"))


def build_wheel(checkout: Path, folder: Path) -> Path:
    """The wheel of a checkout, built into `folder`."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(checkout)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def empty_database(database_url: str) -> Iterator[str]:
    """A database of its own on the tests' server."""
    name = f"wheel_{secrets.token_hex(4)}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield urlunsplit(urlsplit(database_url)._replace(path=f"/{name}"))
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="module")
def installed(wheel: Path, empty_database: str, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel, installed; dependencies come from this environment, but not its link to the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv"), "platbase": str(folder / "venv")}))
    # A folder named in a .pth file is searched, but the .pth files within it are not read: no editable installs.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OPPO_", "DJANGO_", "PYTHON"))}
    environ = kept | {"OPPO_HOME": str(folder / "home"), "DATABASE_URL": empty_database, "OPPO_LOG_FORMAT": "text"}
    (folder / "home").mkdir()
    return Installation(python, folder / "home", environ)


@pytest.fixture(scope="module")
def prepared(installed: Installation) -> dict[str, Any]:
    """Database, static files, first user and tokens, as `oppo up` makes them."""
    answer: dict[str, Any] = json.loads(installed.run("python", "-m", "oppo_cli.bootstrap").splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def address(installed: Installation, prepared: dict[str, Any]) -> Iterator[str]:
    """Where the installed platform answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = installed.home / "web.log"
    with Lifeline() as lifeline, log.open("wb") as output:
        command = [installed.python.with_name("oppo"), "web", "--port", str(port)]
        web = subprocess.Popen(
            command,
            cwd=installed.home,
            env=lifeline.environ(installed.environ),
            pass_fds=(lifeline.fd,),
            stdout=output,
            stderr=output,
        )
        try:
            wait_until_it_answers(f"http://127.0.0.1:{port}/healthz", web, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            web.terminate()
            web.wait(timeout=30)
            print(log.read_text())  # pytest shows it when a test failed


def wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when `url` answers 200. Fails with the log when the process ends first."""
    deadline = time.monotonic() + ANSWERS_WITHIN_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail(f"{url} does not answer: {log.read_text()}")


def submit_a_run(address: str, prepared: dict[str, Any]) -> str:
    """Let a worker join with a catalogue, submit a run as a notebook would; returns the address of its page."""
    joined = post(
        f"{address}/api/worker/v1/join", prepared["join_token"], wire.Join(name="n", hostname="h", cpus=1, memory_bytes=1)
    )
    report = wire.NodeHeartbeat(
        devices=[wire.DeviceReport(index=0, kind="cpu", model="a core", memory_bytes=1)],
        attempts=[],
        catalogue=[wire.CatalogueEntry(id="prompts.jsonl", kind="prompts", bytes=1, rows=1)],
    )
    post(f"{address}/api/worker/v1/heartbeat", joined["node_token"], report)
    body = {"spec": SPEC, "project": prepared["project"]}
    answer = httpx.post(f"{address}/api/v1/runs", json=body, headers={"Authorization": f"Bearer {prepared['api_token']}"})
    assert answer.status_code == 201, answer.text
    return httpx.URL(address).join(answer.json()["url"]).path


def post(url: str, token: str, message: wire.WireModel) -> dict[str, Any]:
    """A worker's call."""
    answer = httpx.post(url, content=message.model_dump_json(), headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def test_it_runs_from_the_wheel_and_not_from_the_checkout(installed: Installation) -> None:
    parts = ("oppo_platform", "oppo_core", "worker", "oppo_bench.engine.race")
    files = ", ".join(f"{part}.__file__" for part in parts)
    used = installed.run("python", "-c", f"import sys, {', '.join(parts)}; print(*sys.path, {files})").split()
    assert str(ROOT) not in used
    assert str(ROOT / "platform") not in used
    assert all(path.startswith(str(installed.python.parents[1])) for path in used[-len(parts) :])


def test_it_registers_the_built_in_rules(wheel: Path, installed: Installation) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (listed,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        assert "[oppo.rules]\nletters:score = oppo_core.rules.letters:score" in archive.read(listed).decode()
    code = "from oppo_core.rewards.registry import find_rule; print(find_rule('letters:score').__module__)"
    assert installed.run("python", "-c", code).split() == ["oppo_core.rules.letters"]


def test_it_holds_the_documentation_if_it_is_built(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in [*(path.lstrip("/") for path in settings["sdist"]["include"]), "pyproject.toml", ".gitignore"]:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, checkout)
        elif name != "build/site":
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    without = names_in(build_wheel(checkout, tmp_path / "without"))
    (checkout / "build" / "site" / "search").mkdir(parents=True)
    for name in ("index.html", "search/search_index.json"):
        (checkout / "build" / "site" / name).write_text("x", encoding="utf-8")
    added = names_in(build_wheel(checkout, tmp_path / "with")) - without
    assert added == {"oppo_platform/_docs/index.html", "oppo_platform/_docs/search/search_index.json"}
    assert {
        "oppo_platform/settings.py",
        "oppo_platform/_templates/base.html",
        "oppo_bench/cli.py",
        "worker/__init__.py",
    } <= without


def names_in(wheel: Path) -> set[str]:
    """Names of the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_it_serves_the_documentation_that_it_holds(wheel: Path, address: str) -> None:
    page = httpx.get(f"{address}/docs/")
    assert page.status_code == 200
    is_built = "oppo_platform/_docs/index.html" in names_in(wheel)
    assert ("make docs" in page.text and "is not built" in page.text) != is_built
    assert not is_built or httpx.get(f"{address}/docs/search/search_index.json").status_code == 200


def test_its_examples_are_valid_specs(installed: Installation) -> None:
    text = installed.run("oppo", "spec", "example")
    (installed.home / "example.yaml").write_text(text, encoding="utf-8")
    assert "valid" in installed.run("oppo", "spec", "check", "example.yaml")


def test_log_in_and_open_a_runs_page(address: str, prepared: dict[str, Any]) -> None:
    page_address = submit_a_run(address, prepared)
    with httpx.Client(base_url=address, follow_redirects=True) as browser:
        assert "/accounts/login" in str(browser.get(page_address).url)
        # The link names the platform's public address; this test knows it under another port.
        assert browser.get(urlsplit(prepared["login_link"]).path).status_code == 200
        page = browser.get(page_address)
        assert page.status_code == 200
        assert urlsplit(str(page.url)).path == page_address
        assert "from the wheel" in page.text
        files = sorted(set(re.findall(r'(?:src|href)="(/static/[^"#]+)"', page.text)))
        assert any(name.endswith(".css") for name in files)
        assert any("plotly" in name for name in files)
        assert {name: code for name in files if (code := browser.get(name).status_code) != 200} == {}
