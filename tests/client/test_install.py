"""The client alone is small: nothing heavy is imported, and nothing of the platform or the engine is installed with it."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("django", "torch", "pydantic", "ruamel", "numpy", "pandas", "plotly", "IPython", "celery", "psycopg", "oppo_contract")
INSTALLED_WITHIN_S = 15.0

NOTEBOOK = """
import math, sys
import pandas
from oppo_client.series import join_series
from oppo_client.tables import to_frame, Table

columns = join_series({"a": {"step": [1, 2], "x": [1.0, 2.0], "y": [5.0, None]}}, "step")
frame = to_frame(columns, None)
assert isinstance(frame, pandas.DataFrame) and list(frame) == ["step", "a"] and frame["a"].isna().tolist() == [False, True]
assert isinstance(to_frame(columns, False), Table)

from IPython.core.formatters import DisplayFormatter
from oppo_client.run_base import RunBase
told = dict(id=7, name="n", state="running", reason="", step=3, total_steps=9, latest={}, eta_s=None, url="/runs/7", error="")
run = RunBase(told, "https://a.example.org")
data, _ = DisplayFormatter().format(run)
assert data["text/html"].startswith("<div>") and data["text/plain"].startswith("<RunBase 7"), data

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from oppo_client.progress import NotebookView
InteractiveShell.instance()
with capture_output() as captured:
    view = NotebookView()
    view.show(run)
    view.show(run)
first, second = captured.outputs
assert "text/html" in first.data and second.update, captured.outputs
print("as it should be")
"""


def python(code: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run code with an interpreter."""
    return subprocess.run(
        [*(command or (sys.executable,)), "-c", code], capture_output=True, text=True, check=False, cwd=ROOT / "platform"
    )


def test_importing_the_client_imports_nothing_heavy() -> None:
    done = python(f"import sys, oppo_client; print(*[name for name in {HEAVY!r} if name in sys.modules])")
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_the_extra_is_one_http_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [Requirement(text).name for text in project["optional-dependencies"]["client"]] == ["httpx"]
    assert [Requirement(text).name for text in project["dependencies"]] == ["click"]  # of the command line


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty environment into which `.[client]` was installed: the first one fills pip's cache.

    Of two others the quicker one counts, because the machine may be busy.
    """
    took_s = []
    for name in ("cold", "warm", "again"):
        folder = tmp_path_factory.mktemp(name) / "venv"
        venv.create(folder, with_pip=True)
        began = time.monotonic()
        done = pip(folder / "bin" / "python", f"{ROOT}[client]")
        took_s.append(time.monotonic() - began)
        assert done.returncode == 0, done.stdout + done.stderr
    assert min(took_s[1:]) < INSTALLED_WITHIN_S, took_s
    return folder / "bin" / "python"


def pip(interpreter: Path, *what: str) -> subprocess.CompletedProcess[str]:
    """pip install, with pip's own settings."""
    return subprocess.run(
        [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
def test_in_an_empty_environment_it_comes_without_platform_and_engine(alone: Path) -> None:
    listed = subprocess.run(
        [str(alone), "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    ).stdout.lower()
    names = {line.partition("==")[0] for line in listed.splitlines() if "==" in line}
    http = {"httpx", "httpcore", "h11", "anyio", "idna", "certifi", "sniffio", "typing_extensions"}
    assert names - http - {"pip", "setuptools"} == {"click", "oppo-platform"}
    helped = subprocess.run([str(alone.with_name("oppo")), "--help"], capture_output=True, text=True, check=True).stdout
    assert "submit" in helped
    done = python("import oppo_client; print(oppo_client.__file__)", str(alone), "-P")
    assert str(alone.parents[1]) in done.stdout, done.stderr
    assert Path(done.stdout.strip()).with_name("py.typed").exists()  # whoever checks types sees the client's
    missing = python("from oppo_client.optional_deps import require; require('pandas', 'x')", str(alone), "-P")
    assert "pip install pandas" in missing.stderr


@pytest.mark.full
def test_pandas_and_ipython_are_used_where_they_are(alone: Path) -> None:
    done = pip(alone, "pandas>=2.2,<4", "ipython>=8.20,<10")
    assert done.returncode == 0, done.stdout + done.stderr
    done = python(NOTEBOOK, str(alone), "-P")
    assert done.stdout.strip().endswith("as it should be"), done.stdout + done.stderr
