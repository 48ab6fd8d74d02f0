"""A checkpoint is whole or not there; a full disk ends the run with a clear word and leaves the former checkpoint intact."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oppo_core.checkpointing.atomic_dir import (
    MANIFEST,
    DiskFullError,
    is_disk_full,
    new_draft,
    publish,
    recover,
    restore_former,
)
from oppo_core.checkpointing.retention import checkpoint_names, checkpoints_to_prune
from oppo_core.checkpointing.save_restore import verify
from oppo_core.control.run_score import Health, RunScore

# Enough for one checkpoint of the small world's run (some 200 KiB), not for two.
SMALL_DISK = 360 * 1024
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from oppo_core.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def sequential(world: Any, *changes: Any) -> Any:
    return world.tree({"steps": 4, "checkpoints": {"every_steps": 2, "keep": 2}, "overlap": {"intra_step": "off"}}, *changes)


def whole(out: Path, world: Any, tree: Any) -> list[str]:
    """The names of all checkpoints; every one is complete, and nothing else lies beside them."""
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    for name in names:
        verify(out / "checkpoints" / name, world.spec(tree))
    return names


@pytest.mark.parametrize("intra", ["off", "per_chunk"])
def test_on_a_full_disk_the_run_ends_and_the_former_checkpoint_is_intact(world: Any, small_disk: Path, intra: str) -> None:
    """A real file system without room for the second checkpoint; with streaming, the critic is written by another process."""
    tree = sequential(world, {"overlap": {"intra_step": intra}, "resources": {"dtype": "float32"}})
    status, events = world.main(tree, small_disk, threads=2)
    assert status == 1
    reason = events[-1].reason
    assert reason.startswith("DiskFullError: no room for a checkpoint in ")
    for words in (str(small_disk / "checkpoints"), "it needs about", "are free", "checkpoints.keep", "resume"):
        assert words in reason
    assert whole(small_disk, world, tree) == ["step-00000002"]
    roomy = small_disk.parent / "roomy"
    status, events = world.main(tree, roomy, "--resume-from", small_disk / "checkpoints" / "step-00000002", threads=2)
    assert (status, events[-1].step) == (0, 4)


def test_a_disk_that_fills_up_on_the_way_leaves_nothing_half_written(world: Any, tmp_path: Path) -> None:
    """No file may grow beyond a limit that the weights exceed: what a quota does, and no look at free space foretells it."""
    tree = sequential(world)
    (tmp_path / "spec.json").write_text(json.dumps(tree))
    command = [sys.executable, "-c", LIMITED, str(16 * 1024), *world.command(tree, tmp_path, 1)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    assert ended.returncode == 1, ended.stderr
    last = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert last["reason"].startswith("DiskFullError: no room for a checkpoint")
    assert os.strerror(27) in last["reason"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-1"
    for text in ("old", "new"):
        with new_draft(folder, 1) as draft:
            (draft / "sub").mkdir()
            (draft / "sub" / "file").write_text(text)
            seal = publish(draft, folder)
        assert (folder / "sub" / "file").read_text() == text
        assert seal.size == 3
    for problem, seen in ((OSError(28, "full"), DiskFullError), (ValueError("other"), ValueError)):
        with pytest.raises(seen):
            fail_half_way(folder, problem)
        assert (folder / "sub" / "file").read_text() == "new"
    with pytest.raises(DiskFullError, match="are free"), new_draft(folder, 2**60):
        pytest.fail("it looked for room too late")
    assert [path.name for path in folder.parent.iterdir()] == ["step-1"]


def fail_half_way(folder: Path, problem: Exception) -> None:
    with new_draft(folder, 1) as draft:
        (draft / "file").write_text("half")
        raise problem


def test_replaced_folder_is_restored_after_a_power_failure(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    (tmp_path / ".step-1.former").mkdir()
    restore_former(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_leftovers_of_a_killed_run_are_removed_at_the_next_start(world: Any, tmp_path: Path) -> None:
    """Also when it is resumed from the very checkpoint that had been taken out of the way."""
    tree = sequential(world, {"steps": 2})
    world.main(tree, tmp_path)
    checkpoints = tmp_path / "checkpoints"
    os.replace(checkpoints / "step-00000002", checkpoints / ".step-00000002.former")
    for name in (".step-00000001.former", ".step-00000002.draft", ".step-00000002-chunk-000003.draft"):
        (checkpoints / name / "actor").mkdir(parents=True)
        (checkpoints / name / "actor" / "model.safetensors").write_bytes(b"half")
    (checkpoints / "step-00000001").mkdir()  # of which `.step-00000001.former` is the predecessor
    status, events = world.main({**tree, "steps": 3}, tmp_path, "--resume-from", checkpoints / "step-00000002")
    assert (status, events[-1].step) == (0, 3)
    assert [path.name for path in checkpoints.iterdir() if path.name.startswith(".")] == []
    (checkpoints / "step-00000001").rmdir()  # not a complete checkpoint, so retention neither counts nor deletes it
    assert whole(tmp_path, world, {**tree, "steps": 3}) == ["step-00000002", "step-00000003"]


def test_tidying_takes_nothing_that_counts(tmp_path: Path) -> None:
    for name in ("step-1", ".step-1.former", ".step-2.former", ".step-3.draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    recover(tmp_path)
    recover(tmp_path / "nowhere")
    assert {path.name: (path / "file").read_text() for path in tmp_path.iterdir()} == {
        "step-1": "step-1", "step-2": ".step-2.former",
    }  # fmt: skip


@pytest.mark.parametrize("stray", ["step-1", ".step-1.draft", ".step-1.former"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_stray_file_or_link_is_replaced(tmp_path: Path, stray: str, kind: str) -> None:
    if kind == "file":
        (tmp_path / stray).write_text("stray")
    else:
        (tmp_path / stray).symlink_to("nowhere")
    folder = tmp_path / "step-1"
    for _ in range(2):
        recover(tmp_path)
        with new_draft(folder, 1) as draft:
            (draft / "file").write_text("new")
            publish(draft, folder)
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert (folder / "file").read_text() == "new"


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-00000002-chunk-000003", "step-00000003.tmp", "step-4", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000006").write_text("stray")
    (tmp_path / "step-00000007").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step-00000008").symlink_to(tmp_path / "step-00000001")
    assert sorted(checkpoint_names(tmp_path)) == ["step-00000001", "step-00000002-chunk-000003"]


def test_a_full_disk_is_known_by_number_and_by_name() -> None:
    assert is_disk_full(OSError(28, "x"))
    assert is_disk_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert not is_disk_full(OSError(2, "No such file"))
    assert resource.RLIM_INFINITY  # the limit above exists here


def test_which_checkpoints_are_kept() -> None:
    names = [f"step-{n:08d}" for n in (10, 20, 30, 40, 50)] + ["step-00000030-chunk-000004"]
    scores = {"step-00000010": 2.0, "step-00000020": 5.0, "step-00000030": 5.0, "step-00000040": float("nan")}
    present = "step-00000040"
    assert checkpoints_to_prune(names, present, scores, keep=1, keep_best=0) == sorted(names)[:4]
    assert checkpoints_to_prune(names, present, scores, keep=1, keep_best=1) == [
        "step-00000010", "step-00000020", "step-00000030-chunk-000004",
    ]  # fmt: skip
    assert checkpoints_to_prune(names, present, scores, keep=2, keep_best=2) == ["step-00000010"]
    assert checkpoints_to_prune(names, present, scores, keep=9, keep_best=0) == []


def test_the_score_of_a_checkpoint_is_the_mean_since_the_last(world: Any) -> None:
    scores, spec = RunScore(), world.spec()
    assert scores.score_checkpoint("before step 1", 0, spec) is None
    for score in (1.0, 2.0):
        scores.add_step(score, Health(0.1, 1.0, 0.0))
    assert scores.score_checkpoint("b", 2, spec) == 1.5
    scores.add_step(5.0, Health(0.1, 1.0, 0.0))
    assert scores.score_checkpoint("c", 3, spec) == 5.0
    assert scores.checkpoints == {"b": 1.5, "c": 5.0}


def test_with_evaluations_only_the_weights_that_were_evaluated_have_a_score(world: Any) -> None:
    scores, spec = RunScore(evaluated=4, evaluation=0.25), world.spec({"evaluation": {"prompts": "prompts.jsonl"}})
    scores.add_step(5.0, Health(0.1, 1.0, 0.0))
    assert [scores.score_checkpoint(str(step), step, spec) for step in (3, 4, 5)] == [None, 0.25, None]
    assert scores.checkpoints == {"4": 0.25}


def test_a_half_done_step_has_no_score_and_takes_none_away(world: Any, tmp_path: Path) -> None:
    """Stopped in step 2, a run still judges the next checkpoint by all steps since the last one."""
    tree = {"steps": 4, "checkpoints": {"every_steps": 2, "keep": 9}, "overlap": {"intra_step": "off"}}
    spec = world.spec(tree)
    questions = []

    def in_step_two() -> bool:
        questions.append(b'"step"' in (tmp_path / "events.jsonl").read_bytes())
        return sum(questions) > 1  # the first question after step 1 comes before step 2

    stopped = world.run(spec, tmp_path, should_stop=in_step_two)
    assert (stopped.engine.batch is not None, stopped.engine.progress.step) == (True, 1)
    assert stopped.engine.run_score.means == [step.metrics["critic/score/mean"] for step in stopped.events if step.kind == "step"]
    ended = world.run(spec, tmp_path, resume=max((tmp_path / "checkpoints").iterdir()))
    told = {event.folder.partition("/")[2]: event.score for event in ended.events if event.kind == "checkpoint"}
    means = [event.metrics["critic/score/mean"] for event in ended.events if event.kind == "step"]
    (half,) = [name for name in told if "chunk" in name]
    assert told == {half: None, "step-00000002": sum(means[:2]) / 2, "step-00000004": sum(means[2:]) / 2}


def test_the_best_are_kept_besides_the_newest_and_told(world: Any, tmp_path: Path) -> None:
    """Every event carries the score; after each checkpoint the newest and the best so far are there."""
    tree = sequential(world, {"steps": 8, "checkpoints": {"every_steps": 1, "keep": 1, "keep_best": 2}})
    status, events = world.main(tree, tmp_path)
    assert status == 0
    told = {Path(event.folder).name: event.score for event in events if event.kind == "checkpoint"}
    means = [event.metrics["critic/score/mean"] for event in events if event.kind == "step"]
    assert list(told.values()) == pytest.approx(means)
    best = sorted(told, key=lambda name: (told[name], name))[-2:]
    assert whole(tmp_path, world, tree) == sorted({*best, "step-00000008"})
    assert json.loads((tmp_path / "checkpoints" / "step-00000008" / "state.json").read_text())["best_rule"].startswith("the mean")
