"""What a run is not resumed from: damaged checkpoints, and specs under which its state would mean something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from oppo_contract import resume_rules
from oppo_contract.spec import load_spec
from oppo_core.checkpointing import resume_changes
from oppo_core.checkpointing.atomic_dir import CheckpointError, sha256
from oppo_core.checkpointing.save_restore import read_intact_state, verify
from oppo_core.distributed.process_group import Ranks
from tests.engine.conftest import newest
from tests.fakes.thread_ranks import on_threads


@pytest.fixture(scope="module")
def checkpoint(world: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The plain spec of a short run, and its checkpoint."""
    changes = {"steps": 2, "overlap": {"intra_step": "off"}}
    run = world.run(world.spec(changes), tmp_path_factory.mktemp("short"))
    return world.tree(changes, {"steps": 3}), newest(run.out)


def refused(world: Any, tree: Any, out: Path, folder: Path) -> str:
    """Resume, expect a refusal, return its reason."""
    status, events = world.main(tree, out, "--resume-from", folder)
    assert status == 1
    assert [event.kind for event in events] == ["finished"], "it started training"
    assert events[-1].outcome == "failed"
    return str(events[-1].reason)


@pytest.mark.parametrize("name", ["actor/model.safetensors", "critic.safetensors", "critic-optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_file_is_refused_by_name(world: Any, checkpoint: Any, tmp_path: Path, name: str, damage: str) -> None:
    tree, whole = checkpoint
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(bytes(content) if damage == "flip" else bytes(content[: len(content) // 2]))
    reason = refused(world, tree, tmp_path / "out", folder)
    assert reason.startswith("CheckpointError")
    assert name in reason


def test_each_file_is_read_by_one_rank_and_all_ranks_refuse(checkpoint: Any, tmp_path: Path) -> None:
    tree, whole = checkpoint
    spec, hashed = load_spec(tree), list[Path]()

    def record(path: Path) -> str:
        hashed.append(path)
        return sha256(path)

    def refusal(ranks: Ranks) -> str:
        with pytest.raises(CheckpointError) as refused:
            verify(folder, spec, ranks)
        return str(refused.value)

    files = [path for path in whole.rglob("*") if path.is_file() and path.name != "manifest.json"]
    with mock.patch("oppo_core.checkpointing.save_restore.sha256", record):
        assert on_threads(2, lambda ranks: [change.path for change in verify(whole, spec, ranks)]) == [["steps"]] * 2
    assert sorted(hashed) == sorted(files)
    for damaged in files:
        folder = tmp_path / f"without {damaged.name}"
        shutil.copytree(whole, folder)
        (folder / damaged.relative_to(whole)).write_bytes(b"damaged")
        first, second = on_threads(2, refusal)
        assert first == second
        assert f"{damaged.relative_to(whole)} is missing or damaged" in first
        if damaged.name == "state.json":  # read before all others where models are from a hub
            with pytest.raises(CheckpointError, match=r"state\.json is missing or damaged"):
                read_intact_state(folder)
        else:
            assert read_intact_state(folder)["spec"]["steps"] == 2


def test_a_missing_or_damaged_shard_is_refused_by_name(world: Any, tmp_path: Path) -> None:
    """Also if the manifest does not list it: then fewer ranks have left shards than have written the checkpoint."""
    tree = world.tree({"steps": 2, "training": {"backend": "fsdp2"}})
    run = world.start(tree, tmp_path / "out")
    assert run.end()[0] == 0
    whole = newest(tmp_path / "out")
    name = "critic.shards/shard-00001-model-00001-of-00001.safetensors"
    for damage in ("flip", "missing", "forgotten"):
        folder = tmp_path / damage
        shutil.copytree(whole, folder)
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).unlink()
        if damage == "flip":
            (folder / name).write_bytes(content)
        if damage == "forgotten":
            manifest = json.loads((folder / "manifest.json").read_text())
            del manifest[name]
            (folder / "manifest.json").write_text(json.dumps(manifest))
        reason = refused(world, {**tree, "steps": 3}, tmp_path / f"out {damage}", folder)
        assert reason.startswith("CheckpointError")
        assert ("critic.shards has no shards of rank 0" if damage == "forgotten" else name) in reason


def test_a_missing_rank_of_a_checkpoint_is_refused_by_name(world: Any, checkpoint: Any, tmp_path: Path) -> None:
    """Its spec has more ranks than there are `rank-N/state.json`, and the manifest lists none of them."""
    tree, whole = checkpoint
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    state = json.loads((folder / "state.json").read_text())
    state["spec"]["resources"] |= {"kind": "cpu", "processes": 2}
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state.json"]["sha256"] = sha256(folder / "state.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    reason = refused(world, tree, tmp_path / "out", folder)
    assert reason.startswith("CheckpointError")
    assert f"{folder}/rank-1/state.json is missing, although 2 ranks wrote it; resume from another checkpoint" in reason


def test_invalid_checkpoint_folder_is_refused(world: Any, checkpoint: Any, tmp_path: Path) -> None:
    tree, whole = checkpoint
    assert "manifest.json" in refused(world, tree, tmp_path / "a", tmp_path / "nowhere")
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    (folder / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in refused(world, tree, tmp_path / "b", folder)


def test_another_spec_is_refused_and_more_steps_are_not(world: Any, checkpoint: Any, tmp_path: Path) -> None:
    tree, whole = checkpoint
    other = world.tree({"seed": 99, "steps": 3, "overlap": {"intra_step": "off"}}, {"rollout": {"temperature": 0.5}})
    reason = refused(world, other | {"models": {**tree["models"], "critic": "actor"}}, tmp_path / "other", whole)
    for words in ("seed: 3 → 99 cannot", "rollout.temperature: 1.0 → 0.5 cannot", "models.critic: reward → actor cannot"):
        assert words in reason
    assert reason.count("set it back, or start a new run") == 3
    assert "steps" not in reason
    more = {**tree, "name": "longer", "logging": {"samples_per_step": 0}, "ppo": {**tree["ppo"], "learning_rate": 1e-4}}
    status, events = world.main(more, tmp_path / "more", "--resume-from", whole)
    assert (status, events[-1].outcome, events[-1].step) == (0, "succeeded", 3)
    told = [line for event in events if event.kind == "log" for line in event.lines]
    assert "ppo.learning_rate: 0.003 → 0.0001" in told
    assert "steps: 2 → 3" in told
    assert next(event.metrics["actor/lr"] for event in events if event.kind == "step") == 1e-4


def test_every_setting_is_known_to_be_changeable_or_not_and_documented(world: Any) -> None:
    """Each setting of a full spec has a rule, and the page on operations names each rule."""
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    told = page.partition("### What a resumed run may change")[2].partition("\n## ")[0]

    def paths(prefix: str, value: Any) -> list[str]:
        if not isinstance(value, dict):
            return [prefix]
        return [path for key, below in value.items() for path in paths(f"{prefix}.{key}" if prefix else key, below)]

    refused = {path for path in paths("", world.spec().model_dump(mode="json")) if resume_rules.refusing_rule(path)}
    assert {"seed", "rollout.temperature", "resources.dtype", "ppo.batch_size", "models.actor.path"} <= refused
    assert refused.isdisjoint({"steps", "ppo.learning_rate", "overlap.chunk.size", "resources.devices", "models.reward.http"})
    for rule in (*resume_rules.ALLOWED, *resume_rules.REFUSED):
        assert f"`{rule}`" in told, rule


def test_more_answers_in_flight_than_there_is_room_for_are_refused_with_the_bound_that_would_do(world: Any) -> None:
    saved, asked = world.spec(), world.spec({"overlap": {"overcommit": {"initial": 1, "max": 1}}})
    (reason,) = resume_changes.find_refusals(resume_rules.diff_specs(saved, asked), 9, asked)
    assert "9 responses in flight, but the spec allows 7" in reason
    assert "overlap.overcommit.max to 3 or more" in reason
    assert resume_changes.find_refusals(resume_rules.diff_specs(saved, asked), 7, asked) == []
    groups = {
        "ppo": {"critic_learning_rate": 1e-5, "algorithm": "grpo", "group_size": 3},
        "models": {"critic": "actor"},
        "overlap": {"overcommit": {"initial": 1, "max": 1}},
    }
    (reason,) = resume_changes.find_refusals([], 6 * 3 + 7, world.spec(groups))
    assert "overlap.overcommit.max to 3 or more" in reason, "Δ counts groups"
