"""The tutorial, block after block, on an empty platform of its own, with runs of three steps: they are runs 1 and 2."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, Block, transformer_blocks
from tests.docs.running import environment_of, reader

SHORTER = {"steps: 20": "steps: 3", " 20 steps": " 3 steps", "step 20/20": "step 3/3", "step-00000020": "step-00000003"}
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def test_a_newcomer_trains_a_published_model_on_a_reward_of_their_own(tmp_path: Path, tools: Any) -> None:
    packages, checkout = tmp_path / "packages", tmp_path / "checkout"
    packages.mkdir()
    checkout.mkdir()
    (checkout / "examples").symlink_to(ROOT / "examples")
    # What the reader installs lies beside this environment instead of in it.
    installing = {"PIP_TARGET": str(packages), "PIP_NO_BUILD_ISOLATION": "false"}
    with tools.cleared(checkout / ".oppo") as home:
        paths = os.pathsep.join([environment_of({})["PYTHONPATH"], str(packages)])
        with tools.running_platform(home, PYTHONPATH=paths) as platform:
            token = tools.oppo(home, "admin", "token", "admin").stdout.strip()
            mine = {"OPPO_URL": platform.base_url, "OPPO_TOKEN": token, "OPPO_CONFIG": str(tmp_path / "config.toml")}
            given = environment_of(tools.environment(home), **mine, **installing) | {"PYTHONPATH": paths}
            with reader(checkout, given) as person:
                for block in transformer_blocks(ROOT / "docs/tutorial.md"):
                    if "oppo submit happy.yaml" in block.text:
                        tools.eventually(lambda: valid(platform, checkout / "happy.yaml"), "the worker to find the models")
                    person.follow(shortened(block))


def shortened(block: Block) -> Block:
    """The block with 3 steps instead of 20."""

    def short(text: str) -> str:
        for written in SHORTER.items():
            text = text.replace(*written)
        return text

    return replace(block, text=short(block.text), output=None if block.output is None else short(block.output))


def valid(platform: Any, spec: Path) -> bool:
    """Whether the platform would take it: a reader is slower than the worker, which looks for models every few seconds."""
    return bool(platform.http.post("runs/validate", json={"yaml": spec.read_text()}).json()["ok"])
