"""A checkpoint that is written in the background: as it was, whole, and published once, in any order of the ranks."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oppo_core.checkpointing.atomic_dir import CheckpointError, DiskFullError, Published, new_draft, recover
from oppo_core.checkpointing.background import BackgroundWriter
from oppo_core.checkpointing.publication import OtherParts, _describe_written, _publish_described, published_at_the_end
from oppo_core.checkpointing.save_restore import check_intact
from oppo_core.distributed.process_group import RankError
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
            (self.path / "critic.shards").mkdir(exist_ok=True)
            (self.path / "critic.shards" / f"shard-{rank + 1:05d}-model.safetensors").write_text(f"shard {rank}")

        return write

    def start(self, rank: int, write: Callable[[], None] | None = None, longest_s: float = 60.0) -> None:
        writer = self.writers[rank]
        writer.add(write or self.part_of(rank))
        if rank:
            writer.start(partial(_describe_written, self.path, rank, 1000), lambda _: None)
        else:
            others = OtherParts(WORLD, writer, longest_s)
            writer.start(partial(_publish_described, self.stack.pop_all(), self.path, self.folder, others), self.reports.append)

    def left(self) -> list[str]:
        return [path.name for path in self.folder.parent.iterdir()]


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    return Draft(tmp_path)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_it_is_published_when_all_ranks_have_written(draft: Draft, order: tuple[int, ...]) -> None:
    for rank in order[:-1]:
        draft.start(rank)
        if rank:
            draft.writers[rank].wait()
    assert not draft.writers[0].ready
    assert not draft.folder.exists()
    draft.start(order[-1])
    draft.writers[0].wait()
    check_intact(draft.folder)
    names = {str(path.relative_to(draft.folder)) for path in draft.folder.rglob("*") if path.is_file()}
    shards = {f"critic.shards/shard-{rank + 1:05d}-model.safetensors" for rank in range(WORLD)}
    assert names == {"manifest.json", "state.json", "rank-1/state.json", "rank-2/state.json"} | shards
    assert [report.size for report in draft.reports] == [sum(len(f"shard {rank}") + 1 for rank in range(WORLD))]
    draft.writers[0].wait()
    assert len(draft.reports) == 1
    assert draft.left() == ["step-00000002"]


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
    assert not writer.ready
    go_on.set()
    writer.wait()
    assert copies["embedding"] is copies["head"]
    assert load_file(tmp_path / "model.safetensors")["embedding"].tolist() == [1.0] * 4


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_and_leaves_nothing(draft: Draft) -> None:
    draft.start(0, full)
    with pytest.raises(DiskFullError, match="no room for a checkpoint"):
        draft.writers[0].wait()
    assert draft.left() == []


def test_a_full_disk_of_another_rank_is_named_on_both(draft: Draft) -> None:
    for rank in range(WORLD):
        draft.start(rank, full if rank == 2 else None)
    with pytest.raises(DiskFullError, match="no room for a checkpoint"):
        draft.writers[2].wait()
    with pytest.raises(DiskFullError, match=r"rank 2: .*no room for a checkpoint"):
        draft.writers[0].wait()
    assert draft.reports == []
    assert draft.left() == []


def test_another_rank_that_fails_is_named(draft: Draft) -> None:
    def fail() -> None:
        raise ValueError("the weights are gone")

    for rank in range(WORLD):
        draft.start(rank, fail if rank == 1 else None)
    with pytest.raises(CheckpointError, match="rank 1: ValueError: the weights are gone"):
        draft.writers[0].wait()


def test_a_silent_rank_is_named(draft: Draft) -> None:
    draft.start(0, longest_s=0.0)
    with pytest.raises(CheckpointError, match=r"rank 1 has not written its part .*longest_silence_s"):
        draft.writers[0].wait()


def test_a_rank_that_is_late_is_named_before_the_other_ranks_collectives_time_out(draft: Draft) -> None:
    """From when training waits, that is sooner than `longest_silence_s` after rank 0's part; until then it is not."""
    writer = draft.writers[0]
    others = OtherParts(WORLD, writer, 60.0)
    assert not others._too_late(time.monotonic() - 59)
    assert others._too_late(time.monotonic() - 61)
    writer.waiting_since = time.monotonic() - 40
    assert not others._too_late(time.monotonic() - 40)
    writer.waiting_since = time.monotonic() - 50
    assert others._too_late(time.monotonic() - 13)
    assert not others._too_late(time.monotonic() - 11), "rank 0 has been as slow: the others have a moment more"
    with pytest.raises(CheckpointError, match=r"rank 1 has not written its part .*longest_silence_s: 60 s"):
        others._entries_of(1, draft.path, draft.folder, time.monotonic() - 13)
    for rank in range(WORLD):
        draft.start(rank)
        assert draft.writers[rank].waiting_since is None, "training goes on"
    writer.wait()
    assert writer.waiting_since is not None


def engine_of(draft: Draft) -> Any:
    left: list[str] = []
    ranks = SimpleNamespace(leave=left.append, reasons=left)
    return SimpleNamespace(
        writer=draft.writers[0], ranks=ranks, spec=SimpleNamespace(resources=SimpleNamespace(longest_silence_s=60.0))
    )


def train(engine: Any, draft: Draft, started: int, error: BaseException) -> None:
    """Training that ends with an error while `started` ranks write their parts."""
    with published_at_the_end(engine):
        for rank in range(started):
            draft.start(rank)
        raise error


def test_an_error_in_training_still_publishes_what_was_written(draft: Draft) -> None:
    engine = engine_of(draft)
    with pytest.raises(SystemExit):
        train(engine, draft, WORLD, SystemExit(3))
    assert len(draft.reports) == 1
    assert engine.ranks.reasons == ["SystemExit: 3"], "the other ranks learn the reason"


def test_after_a_rank_was_lost_its_part_is_not_awaited_for_ever(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo_core.checkpointing.publication.DRAFT_TIMEOUT_S", 0.0)
    with pytest.raises(RankError, match="rank 1 died"):
        train(engine_of(draft), draft, 1, RankError("rank 1 died"))
    assert draft.reports == []
    assert draft.left() == []


def test_a_rank_whose_own_writer_has_failed_reports_that_and_not_the_rank_that_ended_for_it(draft: Draft) -> None:
    draft.start(0)
    draft.start(2, full)
    engine = engine_of(draft)
    engine.writer = draft.writers[2]
    while not engine.writer.ready:
        time.sleep(0.01)
    with pytest.raises(DiskFullError, match="no room for a checkpoint") as raised, published_at_the_end(engine):
        raise RankError("rank 0 has ended: CheckpointError: rank 2: no room")
    assert isinstance(raised.value.__cause__, RankError)
    (reason,) = engine.ranks.reasons
    assert reason.startswith("DiskFullError: no room for a checkpoint")
    draft.start(1)
    with pytest.raises(DiskFullError):
        draft.writers[0].wait()


def test_an_earlier_draft_is_not_continued(draft: Draft) -> None:
    """A rank of an earlier attempt that writes late does not write into the next attempt's draft of the same step."""
    draft.start(1)
    draft.writers[1].wait()
    recover(draft.folder.parent)
    with new_draft(draft.folder, 0) as fresh:
        assert fresh != draft.path
        assert list(fresh.iterdir()) == []
