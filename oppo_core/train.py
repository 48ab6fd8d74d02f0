"""The training loop. Overlap is visible: something is started, other work is done, then it is waited for.

Law: intra-step overlap changes when things are computed, never what; inter-step overlap changes which answers a step
trains, and every token remembers under which weights it was sampled (docs/algorithm.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from oppo_core import report
from oppo_core.checkpoint import save
from oppo_core.engine import Engine
from oppo_core.rollout.sequence import Sequence


@dataclass(slots=True)
class Batch:
    """What decoding gave: the B answers to train, when each finished, and from when to when it decoded."""

    sequences: list[Sequence]
    ends: dict[int, float] = field(default_factory=dict)
    decode: tuple[float, float] = (0.0, 0.0)


def train(engine: Engine, should_stop: Callable[[], bool]) -> str:
    """Train until the last step, the time budget, or `should_stop`; returns the reason. Always ends on a checkpoint."""
    spec, progress = engine.spec, engine.progress
    report.started(engine)
    saved = progress.step
    reason = "all steps are done"
    window_start = engine.clock()
    while progress.step < spec.steps:
        window_start = train_step(engine, window_start)
        if progress.step % spec.checkpoints.every_steps == 0:
            saved = save(engine)
        if should_stop():
            reason = "asked to stop"
            break
        if spec.budget.max_hours is not None and progress.elapsed_s > spec.budget.max_hours * 3600:
            reason = f"the time budget of {spec.budget.max_hours:g} h is used up"
            break
    if saved != progress.step:
        save(engine)
    return reason


def train_step(engine: Engine, window_start: float) -> float:
    """One PPO step (docs/algorithm.md, "One step"). Its window begins where the last one ended; returns where it ends."""
    version = engine.progress.step
    begin_step(engine, version)
    batch = decode_batch(engine, version)
    experience, metrics = engine.update.learn(engine, batch.sequences, version)
    engine.handover.forget(s.sequence_id for s in batch.sequences)
    engine.progress.step += 1
    window_end = engine.clock()
    with engine.trace.span("actor", "data"):
        report.finish_step(engine, batch, experience, metrics, (window_start, window_end))
    return window_end


def begin_step(engine: Engine, version: int) -> None:
    """Top up the pool, and bring every cache to the present weights; with streaming, the scorers do theirs meanwhile."""
    with engine.trace.span("actor", "data"):
        engine.use_cores(len(engine.layout.actor_devices))
        fresh = engine.pool.top_up(engine.overcommit.overcommit, version, engine.new_group)
        engine.cohorts.begin(version, len(fresh))
        if engine.layout.remote:
            # New prompts are read together with their first chunk: a pass over a few tokens costs as much as over many.
            engine.scorers.begin(engine.handover.news(engine.readable(engine.pool.sequences)))
    with engine.trace.span("actor", "actor-prefill", rows=len(engine.pool.sequences)):
        engine.decoder.begin(engine.pool.unfinished(), version)
    engine.update.begin(engine)


def decode_batch(engine: Engine, version: int) -> Batch:
    """Decode chunk after chunk until B answers are ready, handing each chunk to the scorers; take the batch out of the pool."""
    engine.use_cores(engine.layout.decode_threads)
    batch, chunk = Batch([]), 0
    finishers: list[Sequence] = []
    start = engine.clock()
    complete = engine.pool.is_complete(finishers)
    while not complete:
        chunk += 1
        live = list(engine.decoder.live)
        with engine.trace.span("actor", "decode", chunk, rows=len(live)):
            done, complete = decode_chunk(engine, version, finishers)
            if engine.layout.remote:
                engine.scorers.extend(engine.handover.news(engine.readable(live)), chunk)
            finishers += done
            now = engine.clock()
            batch.ends |= {s.sequence_id: now for s in done}
            if not complete:
                engine.update.chunk_done(engine, finishers, version)
    batch.decode = (start, engine.clock())
    with engine.trace.span("actor", "data"):
        engine.use_cores(len(engine.layout.actor_devices))
        batch.sequences = engine.pool.take_batch(finishers)
        engine.cohorts.finish(engine.pool.settled(finishers, batch.sequences))
        engine.let_go(engine.pool.discarded)
    if not engine.layout.remote:
        engine.scorers.extend(engine.handover.news(batch.sequences), 0)
    return batch


def decode_chunk(engine: Engine, version: int, finishers: list[Sequence]) -> tuple[list[Sequence], bool]:
    """At most C rounds; returns who finished, and whether the batch is complete, at which very token decoding stops."""
    done: list[Sequence] = []
    left = engine.chunk.current
    while left:
        finished, used = engine.decoder.advance(left, version)
        left -= used
        done += finished
        if finished and engine.pool.is_complete(finishers + done):
            return done, True
    return done, False
