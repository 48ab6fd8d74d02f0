"""The PPO training loop with intra-step and inter-step overlap (docs/algorithm.md).

Intra-step overlap changes when results are computed, never the results. Inter-step overlap (deferral) changes which responses a
step trains; every token records the policy version that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable

from oppo_core.checkpointing.publication import published_at_the_end
from oppo_core.checkpointing.save_restore import save_at_the_end, save_when_due
from oppo_core.control.stop_conditions import ASKED_TO_STOP
from oppo_core.engine import step_report
from oppo_core.engine.dynamic_sampling import replace_uniform_groups
from oppo_core.engine.state import Engine
from oppo_core.evaluation.schedule import evaluate_first, evaluate_last, evaluate_when_due
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.step_state import StepState
from oppo_core.update.nonfinite import skip_nonfinite


def train(engine: Engine, should_stop: Callable[[], bool]) -> str:
    """Train until a stop condition holds, or `should_stop` is true after a chunk; returns the reason.

    Saves a checkpoint at the end, even within a step.
    """
    step_report.started(engine)
    window_start = engine.clock()
    with published_at_the_end(engine):
        if evaluate_first(engine, should_stop):
            save_when_due(engine)
        while (reason := engine.reason_to_end()) is None:
            with skip_nonfinite(engine):
                window_start = train_step(engine, window_start, should_stop)
            save_when_due(engine)
            if engine.on_any_rank(should_stop()):
                reason = ASKED_TO_STOP
                break
        reason = evaluate_last(engine, reason, should_stop)
        save_at_the_end(engine, window_start)
    return reason


def train_step(engine: Engine, window_start: float, should_stop: Callable[[], bool] = lambda: False) -> float:
    """One PPO step (docs/algorithm.md, "One step"). Returns its end, which is the start of the next step's time window.

    A stopped step remains in `engine.batch`; the next call resumes it, also in another process after a checkpoint.
    """
    version = engine.progress.step
    if engine.batch is None:
        engine.batch = begin_step(engine, version)
    elif engine.batch.interrupted:
        resume_step(engine, engine.batch, version)
    batch = engine.batch
    if not decode_batch(engine, batch, version, should_stop):
        return window_start
    engine.batch = None
    engine.decoder.pause()
    with engine.training_cores():
        experience, metrics = engine.update.train_batch(engine, batch.sequences, version)
    engine.deltas.forget(s.sequence_id for s in batch.sequences)
    engine.progress.step += 1
    evaluate_when_due(engine, should_stop)
    window_end = engine.clock()
    with engine.trace.span("actor", "data"):
        step_report.finish_step(engine, batch, experience, metrics, (window_start, window_end))
    return window_end


def begin_step(engine: Engine, version: int) -> StepState:
    """Top up the pool and fill the KV caches."""
    with engine.trace.span("actor", "data"):
        engine.use_cores(len(engine.layout.actor_devices))
        fresh = engine.pool.top_up(engine.overcommit.overcommit, version, engine.new_group)
        engine.cohorts.begin(version, len(fresh))
    fill_caches(engine, version)
    return StepState()


def resume_step(engine: Engine, batch: StepState, version: int) -> None:
    """Continue an interrupted step, or with new prompts: prefill all tokens again with the same weights."""
    fill_caches(engine, version)
    engine.decoder.rounds, engine.decoder.decoded = batch.rounds, batch.decoded
    batch.interrupted = False


def fill_caches(engine: Engine, version: int) -> None:
    """Place new sequences; prefill the KV caches with the present weights, and with streaming the scorers' at the same time."""
    engine.place(engine.pool.unfinished())
    if engine.layout.streams:
        with engine.trace.span("actor", "data"):
            # New prompts too: the scorers read them while the actor does, and then have less to read in the first chunk.
            engine.scorers.begin(engine.deltas.new_deltas(engine.readable(engine.pool.sequences)))
    with engine.trace.span("actor", "actor-prefill", rows=len(engine.local(engine.pool.sequences))):
        engine.decoder.begin(engine.pool.unfinished(), version)
    engine.update.begin(engine)


def decode_batch(engine: Engine, batch: StepState, version: int, should_stop: Callable[[], bool]) -> bool:
    """Decode in chunks until B responses are finished, streaming each chunk to the scorers; take the batch from the pool.

    Returns False if `should_stop` was true on any rank after a chunk that did not complete the batch.
    """
    start = engine.clock()
    batch.ends = {s.sequence_id: start for s in batch.finishers}
    complete = is_complete(engine, batch, version)
    while not complete:
        engine.use_cores(engine.layout.decode_threads)
        batch.chunk += 1
        live = list(engine.decoder.live)
        with engine.trace.span("actor", "decode", batch.chunk, rows=len(engine.local(live))):
            done, complete = decode_chunk(engine, version, batch.finishers)
            if engine.layout.streams:
                engine.scorers.extend(engine.deltas.new_deltas(engine.readable(live)), batch.chunk)
            batch.finishers += done
            now = engine.clock()
            batch.ends |= {s.sequence_id: now for s in done}
            if not complete:
                engine.update.chunk_done(engine, batch.finishers, version)
        complete = complete and is_complete(engine, batch, version)
        if not complete and engine.on_any_rank(should_stop()):
            return False
    batch.decode = (start, engine.clock())
    with engine.trace.span("actor", "data"):
        engine.use_cores(len(engine.layout.actor_devices))
        batch.sequences = engine.pool.take_batch(batch.finishers)
        engine.cohorts.finish(engine.pool.final(batch.finishers, batch.sequences))
        engine.release(engine.pool.discarded)
        engine.balance(batch.sequences)
    if unsent := engine.deltas.new_deltas(engine.local(batch.sequences)):  # without streaming all, otherwise those moved here
        engine.scorers.extend(unsent, 0)
    return True


def is_complete(engine: Engine, batch: StepState, version: int) -> bool:
    """Whether the batch is complete, after groups without variance were replaced (`ppo.dynamic_sampling`)."""
    while engine.pool.is_complete(batch.finishers):
        if not replace_uniform_groups(engine, batch, version):
            return True
        batch.rounds, batch.decoded = engine.decoder.rounds, engine.decoder.decoded
        resume_step(engine, batch, version)
    return False


def decode_chunk(engine: Engine, version: int, finishers: list[Sequence]) -> tuple[list[Sequence], bool]:
    """Decode at most C tokens per sequence, ending when the batch is complete; returns finished sequences, and whether it is."""
    done: list[Sequence] = []
    left = engine.chunk.current
    while left:
        finished, used = engine.decoder.advance(left, version)
        left -= used
        done += finished
        if finished and engine.pool.is_complete(finishers + done):
            return done, True
    return done, False
