"""The notebooks run from the first cell to the last against a platform with everything real, and stand as they printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.notebooks import NOTEBOOKS, execute
from tests.docs.running import ROOT, environment_of

pytestmark = pytest.mark.timeout(1200)
QUICK = "first-run.ipynb"
LARGEST_KIB = 400
SPEC = {
    "name": "are the models there",
    "steps": 1,
    "models": {"actor": {"path": "own/actor"}, "reward": {"model": {"path": "own/reward"}}},
    "data": {"prompts": "own/prompts.jsonl"},
    "rollout": {"max_new_tokens": 200, "max_prompt_tokens": 16},
}


@pytest.fixture(scope="module")
def reader(home: Path, platform: Any, tools: Any) -> dict[str, str]:
    """The environment of somebody who has logged in and made the small models."""
    here = environment_of(tools.environment(home))
    make = [sys.executable, "-m", "examples.own.make", "--fast", str(home / "models" / "own")]
    subprocess.run(make, cwd=ROOT, env=here, check=True)
    valid = lambda: platform.http.post("runs/validate", json={"spec": SPEC}).json()["ok"]  # noqa: E731
    tools.eventually(valid, "the worker to find the models")
    token = tools.oppo(home, "admin", "token", "admin").stdout.strip()
    return {"OPPO_URL": platform.base_url, "OPPO_TOKEN": token, "PYTHONPATH": here["PYTHONPATH"]}


@pytest.mark.parametrize(
    "notebook", [pytest.param(path, id=path.name, marks=[] if path.name == QUICK else [pytest.mark.full]) for path in NOTEBOOKS]
)
def test_a_notebook_runs(notebook: Path, reader: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in reader.items():
        monkeypatch.setenv(name, value)
    execute(notebook, tmp_path)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_committed_notebook_was_executed_and_is_fit_to_read(notebook: Path) -> None:
    text = notebook.read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run `make notebooks`"
    assert len(text) < LARGEST_KIB * 1024
    said = "".join(
        json.dumps(output) for cell in cells for output in cell["outputs"] if "image/png" not in output.get("data", {})
    )
    assert [word for word in ("/tmp", "/root", "/home", "oppoapi_", "oppologin", '"error"') if word in said] == []
