"""Publishes a checkpoint that all ranks have written into one draft: at once, or when a thread of each rank has written its part.

In the background the ranks do not communicate: each one describes its files in the draft when they are durable, and rank 0
publishes the checkpoint when it finds all descriptions. Until then the checkpoint before is the newest one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from oppo_core.checkpointing.atomic_dir import CheckpointError, Entries, Published, describe, new_draft, publish
from oppo_core.checkpointing.background import BackgroundWriter, Write
from oppo_core.checkpointing.retention import checkpoint_names, checkpoints_to_prune, delete
from oppo_core.distributed.process_group import RankError, rank_dir
from oppo_core.engine.state import Engine
from oppo_core.models.tensor_files import shards_of_rank

# A folder created on one node appears on the others' shared mount with a delay.
DRAFT_TIMEOUT_S, POLL_S = 10.0, 0.02
DESCRIPTION = ".rank-{}.json"  # in a draft: entries of the manifest
# Writes a rank's part: trainers' tensors into the draft (first path) and the rank's state into a folder of its own (second).
WritePart = Callable[[Engine, Path, Path], None]


@contextmanager
def published_at_the_end(engine: Engine) -> Iterator[None]:
    """Around training: publishes a checkpoint that is still being written when training ends, with an error too."""
    try:
        yield
    except BaseException as error:
        # The part of a lost rank may never be written.
        longest = DRAFT_TIMEOUT_S if isinstance(error, RankError) else engine.spec.resources.longest_silence_s
        with suppress(Exception):  # the error that ends the run is the one to report
            engine.writer.wait(longest)
        raise
    engine.writer.wait()


def publish_draft(engine: Engine, folder: Path, score: float | None, write_part: WritePart) -> None:
    """Rank 0: create the draft, write this rank's part, and publish and report the checkpoint when all parts are written."""
    chunk = engine.batch.chunk if engine.batch else 0
    report = partial(_report, engine, folder, engine.progress.step, score, chunk)
    with ExitStack() as failed:
        draft = failed.enter_context(new_draft(folder, engine.actor.saves_bytes + engine.scorers.saves_bytes))
        engine.ranks.all_gather(str(draft).encode())
        write_part(engine, draft, draft)
        if isinstance(engine.writer, BackgroundWriter):
            finish = partial(_publish_described, failed.pop_all(), draft, folder, engine.ranks.world, engine.writer.given_up)
            engine.writer.start(finish, report)
            return
        engine.ranks.any(False)
        published = publish(draft, folder)
    report(published)


def _publish_described(
    failed: ExitStack, draft: Path, folder: Path, world: int, given_up: threading.Event, write: Write
) -> Published:  # fmt: skip
    """In rank 0's thread."""
    with failed:
        write()
        described: Entries = {}
        for rank in range(1, world):
            description = draft / DESCRIPTION.format(rank)
            while not description.exists():
                if given_up.wait(POLL_S):
                    raise CheckpointError(f"the run ends before rank {rank} has written its part of {folder}")
            described |= json.loads(description.read_text())
            description.unlink()
        return publish(draft, folder, described)


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
    own = rank_dir(draft, rank)
    own.mkdir()
    write_part(engine, draft, own)
    if isinstance(engine.writer, BackgroundWriter):
        engine.writer.start(partial(_describe_written, draft, rank), lambda _: None)
        return
    _describe(draft, rank)
    engine.ranks.any(False)


def _describe_written(draft: Path, rank: int, write: Write) -> None:
    """In another rank's thread."""
    write()
    description = draft / DESCRIPTION.format(rank)
    incomplete = description.with_suffix(".new")
    incomplete.write_text(json.dumps(_describe(draft, rank)))
    incomplete.rename(description)


def _describe(draft: Path, rank: int) -> Entries:
    """Make the files of a rank other than the first durable; returns their entries of the manifest."""
    own = [path for path in rank_dir(draft, rank).rglob("*") if path.is_file()]
    return describe(draft, [*own, *shards_of_rank(draft, rank)])
