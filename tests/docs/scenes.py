"""What a page's reader has already when they begin to read: files in their folder, runs on the platform."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from oppo_contract.yaml_text import dump_yaml
from tests.docs.blocks import ROOT
from tests.end_to_end.conftest import Platform, oppo, tiny_spec

Scene = Callable[[Platform, Path], None]
BASELINE = 17


def spec(**changes: Any) -> dict[str, Any]:
    """`ppo.yaml`: a run of some seconds that records answers in every step."""
    return tiny_spec("ppo", checkpoints={"every_steps": 6}, budget={"target_reward": 50.0}, **changes)


def a_notebook(platform: Platform, folder: Path) -> None:
    """A spec, the project `alignment`, and run 17, which has ended well."""
    (folder / "ppo.yaml").write_text(dump_yaml(spec()), encoding="utf-8")
    (team,) = platform.get("teams")["items"]
    assert platform.http.post(f"teams/{team['id']}/projects", json={"name": "alignment"}).status_code == 201
    numbered = f"from django.db import connection as c; c.cursor().execute('ALTER SEQUENCE runs_run_id_seq RESTART {BASELINE}')"
    assert oppo(platform.home, "manage", "shell", "-c", numbered).returncode == 0
    assert platform.submit(spec()) == BASELINE
    assert platform.wait_for_end(BASELINE)["state"] == "succeeded"


def a_checkout(platform: Platform, folder: Path) -> None:
    """The examples, beside which a reader makes their data."""
    (folder / "examples").symlink_to(ROOT / "examples")


SCENES: dict[str, Scene] = {"docs/client.md": a_notebook, "docs/simulation.md": a_checkout, "examples/README.md": a_checkout}
