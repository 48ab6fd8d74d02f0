"""Checks of a run's trackers before it starts: packages, allowed servers, API keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_core.trackers import validate
from oppo_core.trackers.validate import HOSTS_VARIABLE, tracker_errors


def test_missing_packages_servers_and_keys_are_errors(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "MODULES", {"tensorboard": "no_such_tensorboard", "mlflow": "json", "wandb": "json"})
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    three = {
        "tensorboard": {}, "mlflow": {"uri": "http://tracker.example:5000/x"}, "wandb": {"mode": "online"},
    }  # fmt: skip
    spec = world.spec({"logging": {"trackers": three}})
    errors = list(tracker_errors(spec, {HOSTS_VARIABLE: "tracker.example"}))
    assert [line.split(" ")[0] for line in errors] == [
        "logging.trackers.tensorboard", "logging.trackers.mlflow.uri", "logging.trackers.wandb", "logging.trackers.wandb",
    ]  # fmt: skip
    assert "pip install '.[trackers]'" in errors[0]
    assert f"{HOSTS_VARIABLE}=tracker.example:5000" in errors[1]
    assert f"{HOSTS_VARIABLE}=api.wandb.ai:443" in errors[2]
    assert "secrets: {WANDB_API_KEY: secret:NAME}" in errors[3]
    everything = {HOSTS_VARIABLE: "tracker.example:5000 api.wandb.ai", "WANDB_API_KEY": "x"}
    assert len(list(tracker_errors(spec, everything))) == 1
    assert list(tracker_errors(spec, {"RANK": "1"})) == []
    status, events = world.main(world.tree({"logging": {"trackers": {"tensorboard": {}}}}), tmp_path)
    assert (status, events[-1].outcome) == (1, "failed")
    assert events[-1].reason.startswith("PreflightError: logging.trackers.tensorboard needs the package no_such_tensorboard")
