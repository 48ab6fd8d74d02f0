"""Validation of the trackers section of a spec."""

from __future__ import annotations

from typing import Any

import pytest

from oppo_contract.spec import RunSpec, load_spec
from oppo_contract.spec_errors import SpecError


def spec_with(trackers: dict[str, Any]) -> RunSpec:
    return load_spec(
        {
            "name": "told", "steps": 1, "data": {"prompts": "p.jsonl"}, "logging": {"trackers": trackers},
            "models": {"actor": {"path": "a"}, "reward": {"model": {"path": "r"}}},
        }
    )  # fmt: skip


def test_trackers_are_off_by_default_and_on_with_an_empty_section() -> None:
    assert spec_with({}).logging.trackers.enabled == {}
    assert list(spec_with({"wandb": {}, "tensorboard": {}}).logging.trackers.enabled) == ["tensorboard", "wandb"]


@pytest.mark.parametrize("folder", ["tensorboard", "a/b-1.x", "_a"])
def test_a_folder_lies_below_the_runs_own(folder: str) -> None:
    assert spec_with({"tensorboard": {"folder": folder}}).logging.trackers.tensorboard is not None


@pytest.mark.parametrize(
    "folder", ["", "/tmp/x", "..", "a/../b", "a//b", ".hidden", "a/", "checkpoints", "spared/x", "trackers/y"]
)
def test_any_other_folder_is_refused(folder: str) -> None:
    with pytest.raises(SpecError, match=r"logging\.trackers\.tensorboard\.folder"):
        spec_with({"tensorboard": {"folder": folder}})


@pytest.mark.parametrize("uri", ["sqlite:///x.db", "file:///tmp/x", "mlruns", "http://", "http://host:words", "http://h:0"])
def test_mlflow_is_a_server(uri: str) -> None:
    with pytest.raises(SpecError, match=r"logging\.trackers\.mlflow\.uri"):
        spec_with({"mlflow": {"uri": uri}})


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(SpecError) as refused:
        spec_with({"mlflow": {"uri": "https://me:hunter2@host"}})
    assert "contains a user or password" in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("trackers", "said"),
    [
        ({"samples_every": 3}, "samples_every: has no effect without a tracker"),
        ({"flush_s": 3.0}, "flush_s: has no effect without a tracker"),
        ({"wandb": {"url": "https://w.example"}}, "wandb.url: has no effect while mode is offline"),
        ({"wandb": {"mode": "on"}}, "wandb.mode: is not one of the choices"),
        ({"wandb": {"mode": "online", "url": "https://a@b"}}, "wandb.url: contains a user or password"),
        ({"tensorbord": {}}, "did you mean tensorboard?"),
        ({"mlflow": {}}, "mlflow.uri: is required"),
    ],
)  # fmt: skip
def test_unused_and_misspelt_settings_are_rejected(trackers: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said.replace(".", r"\.").replace("?", r"\?")):
        spec_with(trackers)
