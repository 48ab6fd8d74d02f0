"""Publishes a checkpoint that all ranks have written into one draft: at once, or when a thread of each rank has written its part.

In the background the ranks do not communicate: each one describes its files in the draft when they are durable, and rank 0
publishes the checkpoint when it finds all descriptions. Until then the checkpoint before is the newest one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oppo_core.checkpointing.atomic_dir import (
    CheckpointError,
    DiskFullError,
    Entries,
    Published,
    describe,
    disk_full_explained,
    new_draft,
    publish,
    sync,
)
from oppo_core.checkpointing.background import BackgroundWriter, Write
from oppo_core.checkpointing.retention import checkpoint_names, checkpoints_to_prune, delete
from oppo_core.distributed.process_group import RankError, rank_dir
from oppo_core.engine.state import Engine
from oppo_core.models.tensor_files import shards_of_rank

# A folder created on one node appears on the others' shared mount with a delay.
DRAFT_TIMEOUT_S, POLL_S = 10.0, 0.02
WHILE_WAITING = 0.8  # of the limit of collectives, so that rank 0 names the rank that is late before a collective times out
DESCRIPTION = ".rank-{}.json"  # in a draft: a rank's entries of the manifest, or why it failed
# Writes a rank's part: trainers' tensors into the draft (first path) and the rank's state into a folder of its own (second).
WritePart = Callable[[Engine, Path, Path], None]


@contextmanager
def published_at_the_end(engine: Engine) -> Iterator[None]:
    """Around training: publishes a checkpoint that is still being written when training ends, with an error too.

    Raises:
        Exception: what training raised; or what this rank's writer has raised, if it ended the other ranks and so training here.
    """
    try:
        yield
    except BaseException as error:
        lost_rank = isinstance(error, RankError)
        cause = (engine.writer.failure if lost_rank else None) or error
        engine.ranks.leave(f"{type(cause).__name__}: {cause}")  # before waiting: the others name this reason
        # The part of a lost rank may never be written.
        longest = DRAFT_TIMEOUT_S if lost_rank else engine.spec.resources.longest_silence_s
        with suppress(Exception):  # the error that ends the run is the one to report
            engine.writer.wait(longest)
        if cause is not error:
            raise cause from error
        raise
    engine.writer.wait()


def publish_draft(engine: Engine, folder: Path, score: float | None, write_part: WritePart) -> None:
    """Rank 0: create the draft, write this rank's part, and publish and report the checkpoint when all parts are written."""
    chunk = engine.batch.chunk if engine.batch else 0
    report = partial(_report, engine, folder, engine.progress.step, score, chunk)
    with ExitStack() as failed:
        draft = failed.enter_context(new_draft(folder, needed_bytes(engine)))
        engine.ranks.all_gather(str(draft).encode())
        write_part(engine, draft, draft)
        if isinstance(engine.writer, BackgroundWriter):
            others = OtherParts(engine.ranks.world, engine.writer, engine.spec.resources.longest_silence_s)
            engine.writer.start(partial(_publish_described, failed.pop_all(), draft, folder, others), report)
            return
        engine.ranks.any(False)
        published = publish(draft, folder)
    report(published)


def needed_bytes(engine: Engine) -> int:
    """Estimate of a checkpoint's size."""
    return engine.actor.saves_bytes + engine.scorers.saves_bytes


@dataclass(frozen=True, slots=True)
class OtherParts:
    """The other ranks' parts, awaited until rank 0's `writer` gives up, or for `longest_s` seconds after rank 0's is written.

    For less if training waits for them too: ranks that have written theirs wait for rank 0 in a collective, which has the same
    limit, and would report rank 0 in place of the rank that is late.
    """

    world: int
    writer: BackgroundWriter
    longest_s: float

    def entries(self, draft: Path, folder: Path) -> Entries:
        """Their entries of the manifest.

        Raises:
            CheckpointError, DiskFullError: a rank has failed or is silent, or the run ends.
        """
        written = time.monotonic()
        described: Entries = {}
        for rank in range(1, self.world):
            described |= self._entries_of(rank, draft, folder, written)
        if self.writer.given_up.is_set():
            raise CheckpointError(f"the run ended before {folder} was complete; resume from the checkpoint before it")
        return described

    def _entries_of(self, rank: int, draft: Path, folder: Path, written: float) -> Entries:
        name, before = DESCRIPTION.format(rank), "resume from the checkpoint before it"
        while name not in os.listdir(draft):  # a network file system may remember for long that a single file is not there
            if self._too_late(written):
                raise CheckpointError(
                    f"rank {rank} has not written its part of {folder} in time"
                    f" (resources.longest_silence_s: {self.longest_s:g} s); look at its node and its disk, and {before}"
                )
            if self.writer.given_up.wait(POLL_S):
                raise CheckpointError(f"the run ended before rank {rank} had written its part of {folder}; {before}")
        found = json.loads((draft / name).read_text())
        (draft / name).unlink()
        if "failed" in found:
            raise (DiskFullError if found["disk_full"] else CheckpointError)(f"rank {rank}: {found['failed']}")
        entries: Entries = found["entries"]
        return entries

    def _too_late(self, written: float) -> bool:
        now, waiting = time.monotonic(), self.writer.waiting_since
        if waiting is None:
            return now > written + self.longest_s
        sooner = WHILE_WAITING * self.longest_s
        return now > max(waiting + sooner, written + self.longest_s - sooner)


def _publish_described(failed: ExitStack, draft: Path, folder: Path, others: OtherParts, write: Write) -> Published:
    """In rank 0's thread."""
    with failed:
        write()
        return publish(draft, folder, others.entries(draft, folder))


def _report(engine: Engine, folder: Path, step: int, score: float | None, chunk: int, published: Published) -> None:
    """Report a checkpoint and delete those that need not be retained."""
    retention = engine.spec.checkpoints
    engine.journal.write(
        "checkpoint", step=step, folder=str(folder.relative_to(engine.out)), manifest_sha256=published.digest,
        bytes=published.size, score=score, chunk=chunk,
    )  # fmt: skip
    names = checkpoint_names(folder.parent)
    delete(
        engine.out, checkpoints_to_prune(names, folder.name, engine.run_score.checkpoints, retention.keep, retention.keep_best)
    )


def add_to_draft(engine: Engine, write_part: WritePart) -> None:
    """Other ranks: write this rank's part into rank 0's draft. Raises CheckpointError if the draft does not appear here."""
    draft, rank = Path(engine.ranks.all_gather(b"")[0].decode()), engine.ranks.rank
    deadline = time.monotonic() + DRAFT_TIMEOUT_S
    while not draft.is_dir() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if not draft.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see {draft}, which rank 0 has created: --out must be a folder that all nodes"
            " share (OPPO_ARTIFACT_ROOT)"
        )
    own, needed = rank_dir(draft, rank), needed_bytes(engine)
    with _failure_described(draft, rank, needed):
        own.mkdir()
        write_part(engine, draft, own)
        if isinstance(engine.writer, BackgroundWriter):
            engine.writer.start(partial(_describe_written, draft, rank, needed), lambda _: None)
            return
        for path in _files_of(draft, rank):
            sync(path)
    engine.ranks.any(False)


def _describe_written(draft: Path, rank: int, needed: int, write: Write) -> None:
    """In another rank's thread."""
    with _failure_described(draft, rank, needed):
        write()
        _put(draft, rank, {"entries": describe(draft, _files_of(draft, rank))})


@contextmanager
def _failure_described(draft: Path, rank: int, needed: int) -> Iterator[None]:
    """Describes an error within to rank 0, which then does not wait for this rank's part."""
    try:
        with disk_full_explained(draft.parent, needed):
            yield
    except Exception as error:
        with suppress(OSError):  # then rank 0 waits as for a silent rank
            _put(draft, rank, {"failed": f"{type(error).__name__}: {error}", "disk_full": isinstance(error, DiskFullError)})
        raise


def _put(draft: Path, rank: int, description: dict[str, Any]) -> None:
    file = draft / DESCRIPTION.format(rank)
    incomplete = file.with_suffix(".new")
    incomplete.write_text(json.dumps(description))
    incomplete.rename(file)


def _files_of(draft: Path, rank: int) -> list[Path]:
    """The files of a rank other than the first."""
    return [*(path for path in rank_dir(draft, rank).rglob("*") if path.is_file()), *shards_of_rank(draft, rank)]
