"""The tutorial, block after block, on an empty platform of its own: its reader's first two runs are runs 1 and 2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, transformer_blocks
from tests.docs.running import environment_of, reader

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def test_a_newcomer_trains_a_model_of_their_own(tmp_path: Path, tools: Any) -> None:
    packages, checkout = tmp_path / "packages", tmp_path / "checkout"
    packages.mkdir()
    checkout.mkdir()
    (checkout / "examples").symlink_to(ROOT / "examples")
    # What the reader installs lies beside this environment instead of in it.
    installing = {"PIP_TARGET": str(packages), "PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_INDEX": "1"}
    with tools.cleared(checkout / ".oppo") as home:
        paths = os.pathsep.join([environment_of({})["PYTHONPATH"], str(packages)])
        with tools.running_platform(home, PYTHONPATH=paths) as platform:
            token = tools.oppo(home, "admin", "token", "admin").stdout.strip()
            mine = {"OPPO_URL": platform.base_url, "OPPO_TOKEN": token, "OPPO_CONFIG": str(tmp_path / "config.toml")}
            given = environment_of(tools.environment(home), **mine, **installing) | {"PYTHONPATH": paths}
            with reader(checkout, given) as person:
                for block in transformer_blocks(ROOT / "docs/tutorial.md"):
                    if "oppo submit own.yaml" in block.text:
                        tools.eventually(lambda: valid(platform, checkout / "own.yaml"), "the worker to find the models")
                    person.follow(block)


def valid(platform: Any, spec: Path) -> bool:
    """Whether the platform would take it: a reader is slower than the worker, which looks for models every ten seconds."""
    return bool(platform.http.post("runs/validate", json={"yaml": spec.read_text()}).json()["ok"])
