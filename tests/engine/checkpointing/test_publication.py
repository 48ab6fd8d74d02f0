"""A checkpoint that is written in the background: as it was, whole, published once, whoever is ready first."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

from oppo_core.checkpointing.atomic_dir import CheckpointError, DiskFullError, Published, new_draft
from oppo_core.checkpointing.background import BackgroundWriter
from oppo_core.checkpointing.publication import _describe_written, _publish_described
from oppo_core.checkpointing.save_restore import check_intact
from oppo_core.models.tensor_files import save_weights

WORLD = 3


class Draft:
    """A draft of three ranks, whose parts are written by threads of their own."""

    def __init__(self, parent: Path) -> None:
        self.folder = parent / "step-00000002"
        self.stack = ExitStack()
        self.path = self.stack.enter_context(new_draft(self.folder, 0))
        self.writers = [BackgroundWriter() for _ in range(WORLD)]
        self.reports: list[Published] = []

    def part_of(self, rank: int) -> Callable[[], None]:
        def write() -> None:
            own = self.path / f"rank-{rank}" if rank else self.path
            own.mkdir(exist_ok=True)
            (own / "state.json").write_text(str(rank))
            (self.path / "critic").mkdir(exist_ok=True)
            (self.path / "critic" / f"shard-{rank + 1:05d}-model.safetensors").write_text(f"shard {rank}")

        return write

    def start(self, rank: int, write: Callable[[], None] | None = None) -> None:
        writer = self.writers[rank]
        writer.add(write or self.part_of(rank))
        if rank:
            writer.start(partial(_describe_written, self.path, rank), lambda _: None)
        else:
            publish = partial(_publish_described, self.stack.pop_all(), self.path, self.folder, WORLD, writer.given_up)
            writer.start(publish, self.reports.append)


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    return Draft(tmp_path)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_it_is_published_when_the_last_rank_is_ready(draft: Draft, order: tuple[int, ...]) -> None:
    for rank in order[:-1]:
        draft.start(rank)
        if rank:
            draft.writers[rank].wait()
    draft.writers[0].poll()
    assert not draft.folder.exists()
    assert draft.reports == []
    draft.start(order[-1])
    draft.writers[0].wait()
    check_intact(draft.folder)
    names = {str(path.relative_to(draft.folder)) for path in draft.folder.rglob("*") if path.is_file()}
    shards = {f"critic/shard-{rank + 1:05d}-model.safetensors" for rank in range(WORLD)}
    assert names == {"manifest.json", "state.json", "rank-1/state.json", "rank-2/state.json"} | shards
    assert [report.size for report in draft.reports] == [sum(len(f"shard {rank}") + 1 for rank in range(WORLD))]
    draft.writers[0].wait()
    draft.writers[0].poll()
    assert len(draft.reports) == 1


def test_tensors_are_saved_as_they_were(tmp_path: Path) -> None:
    """Tied weights stay tied in the copy, so they are written once."""
    writer, go_on = BackgroundWriter(), threading.Event()
    weight = torch.ones(4, requires_grad=True)
    copies = writer.copy({"embedding": weight, "head": weight.detach(), "other": torch.zeros(2)})
    writer.add(lambda: save_weights({name: copies[name] for name in ("embedding", "other")}, tmp_path / "model.safetensors"))

    def finish(write: Callable[[], None]) -> None:
        go_on.wait()
        write()

    writer.start(finish, lambda _: None)
    with torch.no_grad():
        weight.add_(1)
    writer.poll()
    go_on.set()
    writer.wait()
    assert copies["embedding"] is copies["head"]
    from safetensors.torch import load_file

    assert load_file(tmp_path / "model.safetensors")["embedding"].tolist() == [1.0] * 4


def test_a_full_disk_is_named_and_leaves_nothing(draft: Draft) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    draft.start(0, full)
    with pytest.raises(DiskFullError, match="no room for a checkpoint"):
        draft.writers[0].wait()
    assert list(draft.folder.parent.iterdir()) == []


def test_a_failed_part_of_another_rank_is_not_published(draft: Draft) -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    for rank in range(WORLD):
        draft.start(rank, fail if rank == 2 else None)
    with pytest.raises(OSError, match="the disk is gone"):
        draft.writers[2].wait()
    draft.writers[0].wait(timeout_s=0.0)
    draft.writers[0]._thread.shutdown()
    assert draft.reports == []
    assert list(draft.folder.parent.iterdir()) == []


def test_what_is_given_up_names_the_missing_rank(draft: Draft) -> None:
    draft.start(0)
    pending = draft.writers[0]._pending
    assert pending is not None
    draft.writers[0].wait(timeout_s=0.0)
    with pytest.raises(CheckpointError, match="before rank 1 has written its part"):
        pending.future.result()
