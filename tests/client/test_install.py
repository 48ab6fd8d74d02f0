"""The client alone is small: nothing heavy is imported, and nothing of the platform or the engine is installed with it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("django", "torch", "pydantic", "ruamel", "numpy", "pandas", "plotly", "IPython", "celery", "psycopg", "oppo_contract")


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
    base = {Requirement(text).name for text in project["dependencies"]}
    assert not base & {"django", "torch", "numpy", "celery", "psycopg"}
