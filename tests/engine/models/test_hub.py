"""Models by hub id: refused without the operator's consent, otherwise downloaded once and pinned to a commit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from oppo_contract.events import parse_event
from oppo_contract.model_folder import ModelFolderError
from oppo_core.models import hub as hub_module
from tests.fakes.hub import Hub, serve

NAME = "small-lab/actor"


@pytest.fixture
def hub(world: Any) -> Iterator[Hub]:
    """Two commits of the world's actor, with files that are never downloaded."""
    files = {file.name: file.read_bytes() for file in (world.folder / "actor").iterdir()}
    others = {"consolidated.safetensors": b"the same again", "pytorch_model.bin": b"pickle", "modeling.py": b"code"}
    files |= others | {"onnx/model.json": b"{}"}
    with serve(Hub({NAME: [files | {"README.txt": b"first"}, files | {"README.txt": b"second"}]})) as hub:
        yield hub


def train(world: Any, hub: Hub, root: Path, out: Path, *arguments: Any, allow: str = "1", **changes: Any) -> list[Any]:
    """The events of an engine that may reach the hub, in a process of its own: the library reads the endpoint when imported."""
    actor = {"models": {"actor": {"path": changes.pop("path", NAME)}, "critic": "actor"}}
    tree = world.tree({"steps": 1, "overlap": {"intra_step": "off"}}, actor, changes)
    environ = os.environ | {"HF_ENDPOINT": hub.url, "OPPO_ALLOW_HUB": allow, "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "oppo_core", *world.command(tree, out, 1), "--root", str(root), *map(str, arguments)]
    command[command.index("--root") + 1 : command.index("--root") + 1] = [str(root), "--root"]
    subprocess.run(command, env=environ, check=False, capture_output=True, timeout=200)
    return [parse_event(line) for line in (out / "events.jsonl").read_bytes().splitlines()]


def test_a_hub_model_is_downloaded_once_pinned_and_kept_by_a_resumed_run(world: Any, hub: Hub, tmp_path: Path) -> None:
    root, second = tmp_path / "root", Hub.commit(1)
    root.mkdir()
    events = train(world, hub, root, tmp_path / "run")
    assert events[-1].outcome == "succeeded", events[-1].reason
    (started,) = [event for event in events if event.kind == "started"]
    pinned = dict.fromkeys(("actor", "reference", "critic"), f"{NAME}@{second}")
    assert started.commits == pinned
    lines = [line for event in events if event.kind == "log" for line in event.lines]
    assert any(line.startswith(f"Downloading {NAME}@{second}: ") and line.endswith(" MiB") for line in lines), lines
    folder = root / "cache" / NAME / second
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json", "README.txt"}
    assert (folder / "README.txt").read_bytes() == b"second"
    assert not any("pytorch_model" in path and "resolve" in path for path in hub.asked)
    hub.repositories[NAME].append(dict(hub.repositories[NAME][0]))
    hub.asked.clear()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    resumed = train(world, hub, root, tmp_path / "more", "--resume-from", checkpoint, steps=2)
    assert resumed[-1].outcome == "succeeded", resumed[-1].reason
    assert [event.commits for event in resumed if event.kind == "started"] == [pinned]
    assert hub.asked == [], "the recorded commit is on the disk"
    elsewhere = {"path": f"{NAME}@{Hub.commit(0)}", "steps": 2}
    refused = train(world, hub, root, tmp_path / "other", "--resume-from", checkpoint, **elsewhere)
    assert refused[-1].outcome == "failed"
    assert "models" in refused[-1].reason
    shutil.rmtree(tmp_path / "run")
    older = train(world, hub, root, tmp_path / "run", path=f"{NAME}@{Hub.commit(0)}")
    assert {event.commits["actor"] for event in older if event.kind == "started"} == {f"{NAME}@{Hub.commit(0)}"}


@pytest.mark.parametrize(
    ("allow", "path", "said"),
    [
        ("", NAME, f"{NAME} does not exist here"),
        ("1", "small-lab/other", "small-lab/other cannot be downloaded from http://127.0.0.1:"),
        ("1", f"{NAME}@v9", f"{NAME}@v9 cannot be downloaded from http://127.0.0.1:"),
    ],
)
def test_refusals_name_the_model_and_the_reason(world: Any, hub: Hub, tmp_path: Path, allow: str, path: str, said: str) -> None:
    events = train(world, hub, tmp_path, tmp_path / "run", allow=allow, path=path)
    assert [event.kind for event in events] == ["finished"]
    assert said in events[0].reason
    if not allow:
        assert f"download a hub model first: hf download {NAME}" in events[0].reason
        assert hub.asked == []
    assert json.loads((tmp_path / "run" / "spec.json").read_text())["models"]["actor"]["path"] == path


def test_two_revisions_of_a_model_stay_two_in_a_resumed_run(world: Any, hub: Hub, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    other = {"models": {"reference": {"path": f"{NAME}@{Hub.commit(0)}"}}}
    events = train(world, hub, root, tmp_path / "run", **other)
    assert events[-1].outcome == "succeeded", events[-1].reason
    pinned = {"actor": f"{NAME}@{Hub.commit(1)}", "critic": f"{NAME}@{Hub.commit(1)}", "reference": f"{NAME}@{Hub.commit(0)}"}
    assert [event.commits for event in events if event.kind == "started"] == [pinned]
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    resumed = train(world, hub, root, tmp_path / "more", "--resume-from", checkpoint, steps=2, **other)
    assert resumed[-1].outcome == "succeeded", resumed[-1].reason
    assert [event.commits for event in resumed if event.kind == "started"] == [pinned]


def test_a_link_that_cannot_be_used_is_reported_and_not_replaced_by_a_download(world: Any, hub: Hub, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "small-lab").mkdir(parents=True)
    (root / NAME).symlink_to(tmp_path / "elsewhere")
    events = train(world, hub, root, tmp_path / "run")
    assert "is a link to" in events[-1].reason
    assert hub.asked == []


def test_a_download_reports_its_progress_and_needs_room_on_the_disk(
    world: Any, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
    monkeypatch.setattr(hub_module, "REPORT_INTERVAL_S", 0.01)
    spec, lines, seen = world.spec({"models": {"actor": {"path": NAME}, "critic": "actor"}}), list[str](), threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if "%" in line:
            seen.set()

    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 100))
        with pytest.raises(ModelFolderError, match=r"its files are [0-9.]+ MiB, and .* has 0.0 MiB free"):
            hub_module.pin_hub_models(spec, [tmp_path], None, say)
    assert lines == []
    hub.held = seen  # no file is sent before a report of its progress
    pinned = hub_module.pin_hub_models(spec, [tmp_path], None, say)
    assert pinned.models.actor.path == f"{NAME}@{Hub.commit(1)}"
    assert "% of" in lines[1]


@pytest.mark.parametrize("role", ["reference", "critic"])
def test_every_role_needs_the_operators_consent(world: Any, hub: Hub, tmp_path: Path, role: str) -> None:
    events = train(world, hub, tmp_path, tmp_path / "run", allow="", path="actor", models={role: {"path": NAME}})
    assert [event.kind for event in events] == ["finished"]
    assert f"{role}: {NAME} does not exist here" in events[0].reason
    assert f"hf download {NAME}" in events[0].reason
    assert "OPPO_ALLOW_HUB=1" in events[0].reason
    assert hub.asked == []
