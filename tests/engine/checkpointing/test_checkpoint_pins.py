"""What the platform resumes from is never deleted, however often the engine writes while nobody registers."""

from __future__ import annotations

import threading
from pathlib import Path

from oppo_contract.checkpoint_pins import FOLDER, pinned_names, pins_exist, pins_locked, remove_older_pins, write_pins
from oppo_core.checkpointing.retention import delete


def written(out: Path, step: int) -> str:
    name = f"step-{step:08d}"
    (out / "checkpoints" / name).mkdir(parents=True)
    (out / "checkpoints" / name / "manifest.json").write_text("{}")
    return name


def left(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_without_a_platform_nothing_is_spared_and_no_file_appears(tmp_path: Path) -> None:
    delete(tmp_path, [written(tmp_path, 5)])
    assert left(tmp_path) == []
    assert not pins_exist(tmp_path)


def test_pinned_checkpoints_stay_and_all_others_are_deleted(tmp_path: Path) -> None:
    names = [written(tmp_path, step) for step in (5, 10, 15)]
    with pins_locked(tmp_path):
        write_pins(tmp_path, 3, [names[0]])
    delete(tmp_path, names)
    assert left(tmp_path) == [names[0]]
    with pins_locked(tmp_path):
        write_pins(tmp_path, 3, [])
    delete(tmp_path, [names[0]])
    assert left(tmp_path) == []


def test_pins_of_all_live_attempts_count_and_older_ones_are_dropped(tmp_path: Path) -> None:
    with pins_locked(tmp_path):
        write_pins(tmp_path, 3, ["a"])
        write_pins(tmp_path, 12, ["b"])
        assert pinned_names(tmp_path) == {"a", "b"}
        remove_older_pins(tmp_path, 12)
        assert pinned_names(tmp_path) == {"b"}
    assert sorted(file.name for file in (tmp_path / FOLDER).iterdir()) == ["12", "lock"]


def test_naming_waits_while_folders_are_taken_away(tmp_path: Path) -> None:
    """Otherwise a checkpoint could be found there, registered, and deleted, all in one moment."""
    found: list[bool] = []

    def register(name: str) -> None:
        with pins_locked(tmp_path):
            write_pins(tmp_path, 1, [name])
            found.append((tmp_path / "checkpoints" / name).is_dir())

    for step in range(50):
        with pins_locked(tmp_path):
            write_pins(tmp_path, 1, [])
        name = written(tmp_path, step)
        threads = [threading.Thread(target=register, args=(name,)), threading.Thread(target=delete, args=(tmp_path, [name]))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found.pop() == (tmp_path / "checkpoints" / name).is_dir()


def test_a_run_that_is_cut_off_keeps_the_checkpoint_that_is_registered(world, tmp_path: Path) -> None:
    """The real engine writes three more, of which it keeps one: the registered one stays beside it."""
    out = tmp_path / "out"
    with pins_locked(out):
        write_pins(out, 1, ["step-00000002"])
    tree = world.tree({"steps": 8, "checkpoints": {"every_steps": 2, "keep": 1}})
    status, _ = world.main(tree, out)
    assert status == 0
    assert left(out) == ["step-00000002", "step-00000008"]
