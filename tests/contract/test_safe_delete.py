"""Deletion of artifact folders stays below the root, with symlinks of any kind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oppo_contract.safe_delete import OutsideRootError, delete_below, delete_run_folder

PARTS = st.lists(st.sampled_from(["runs", "7", "8", "checkpoints", "..", ".", "link", "", "deep", "x\0y"]), max_size=6)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A root with two runs, one with links to the other and to the outside."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("kept")
    root = tmp_path / "root"
    for run in ("7", "8"):
        for name in ("a", "b"):
            (root / "runs" / run / "checkpoints" / name / "deep").mkdir(parents=True)
            (root / "runs" / run / "checkpoints" / name / "deep" / "weights").write_text(run)
    (root / "runs" / "7" / "link").symlink_to(tmp_path / "outside")
    (root / "runs" / "7" / "checkpoints" / "a" / "link").symlink_to(tmp_path / "outside", target_is_directory=True)
    (root / "runs" / "7" / "other").symlink_to(root / "runs" / "8")
    return root


def test_delete_removes_links_and_not_their_targets(store: Path) -> None:
    assert delete_run_folder(store.as_uri(), 7, f"{store.as_uri()}/runs/7")
    assert not (store / "runs" / "7").exists()
    assert (store / "runs" / "8" / "checkpoints" / "a" / "deep" / "weights").read_text() == "8"
    assert (store.parent / "outside" / "precious").exists()
    assert not delete_run_folder(store.as_uri(), 7, f"{store.as_uri()}/runs/7")  # again: it is not there any more


def test_delete_one_checkpoint(store: Path) -> None:
    assert delete_run_folder(store.as_uri(), 7, f"{store.as_uri()}/runs/7/checkpoints/b")
    assert [p.name for p in (store / "runs" / "7" / "checkpoints").iterdir()] == ["a"]


@pytest.mark.parametrize(
    "place",
    ["runs/7/link", "runs/7/link/precious", "runs/7/other/checkpoints", "runs/8", "runs", "", "runs/7/../8", "runs/7/other"],
)
def test_links_and_other_folders_are_rejected(store: Path, place: str) -> None:
    before = sorted(p for p in store.parent.rglob("*"))
    with pytest.raises(OutsideRootError):
        delete_run_folder(store.as_uri(), 7, f"{store.as_uri()}/{place}")
    assert sorted(p for p in store.parent.rglob("*")) == before


@pytest.mark.parametrize("url", ["http://host/runs/7", "file://host/runs/7", "runs/7", "file:///"])
def test_other_urls_are_refused(store: Path, url: str) -> None:
    with pytest.raises(OutsideRootError):
        delete_run_folder(store.as_uri(), 7, url)


def test_missing_root_raises_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        delete_run_folder((tmp_path / "nowhere").as_uri(), 7, (tmp_path / "nowhere" / "runs" / "7").as_uri())


def test_a_file_in_the_place_of_a_folder_is_refused(store: Path) -> None:
    with pytest.raises(OutsideRootError):
        delete_below(store, store / "runs" / "8" / "checkpoints" / "a" / "deep" / "weights")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=PARTS)
def test_any_path_leaves_the_outside_and_other_runs_untouched(store: Path, parts: list[str]) -> None:
    try:
        delete_run_folder(store.as_uri(), 7, f"{store.as_uri()}/{'/'.join(parts)}")
    except (OutsideRootError, OSError):
        pass
    assert (store.parent / "outside" / "precious").exists()
    assert (store / "runs" / "8" / "checkpoints" / "a" / "deep" / "weights").exists()


def test_concurrent_deletion_of_one_folder(tmp_path: Path) -> None:
    """As by the platform and the agent on the same machine."""
    folder = tmp_path / "runs" / "7"
    both = Barrier(2)

    def delete(_: int) -> None:
        both.wait()
        delete_run_folder(tmp_path.as_uri(), 7, folder.as_uri())

    with ThreadPoolExecutor(2) as pool:
        for _ in range(30):
            for number in range(60):
                (folder / f"{number % 7}" / f"{number % 3}").mkdir(parents=True, exist_ok=True)
                (folder / f"{number % 7}" / f"{number % 3}" / f"{number}").write_text("")
            assert list(pool.map(delete, range(2))) == [None, None]
            assert not folder.exists()
