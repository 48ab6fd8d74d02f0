"""What a step tells: controllers are asked, metrics gathered, events written. Nothing here changes what is computed,
except through the controllers' decisions for the next step.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from oppo_contract.events import Counter
from oppo_core.control.controllers import Decision, adjust_chunk, adjust_overcommit
from oppo_core.models.oom_retry import Shrunk
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.losses import adapted_kl_coefficient
from oppo_core.reporting.metrics import experience_metrics, overlap_metrics, tail_batch_metrics, value_metrics
from oppo_core.trace.step_trace import Samples, StepTrace, deferred_rows, running_total

if TYPE_CHECKING:
    from oppo_core.engine.state import Engine
    from oppo_core.rollout.step_state import StepState

# DecoderProtocol with at most this share of B+Δ rows is the tail.
TAIL_SHARE = 0.25


def recovered(engine: Engine) -> None:
    """A step was sound: a row of faults is over once the run is beyond the step at which the last of them was."""
    if engine.progress.step > engine.progress.nonfinite_at:
        engine.progress.nonfinite_row = 0


def started(engine: Engine) -> None:
    """Tell that everything is loaded, on all ranks. The event's time is the origin of all span times."""
    engine.ranks.any(False)
    engine.origin = engine.clock()
    engine.journal.write(
        "started", devices=engine.layout.devices, lanes=engine.layout.lanes(),
        start_step=engine.progress.step, total_steps=engine.spec.steps,
    )  # fmt: skip
    if engine.changes:
        lines = ["Resumed with other settings than the checkpoint's:", *map(str, engine.changes)]
        engine.journal.write("log", stream="stdout", lines=lines)


def finish_step(
    engine: Engine, batch: StepState, experience: Experience, metrics: dict[str, float], window: tuple[float, float]
) -> None:
    """Account for the step that just ended and let the controllers choose the next step's Δ, C and KL coefficient."""
    progress, spec = engine.progress, engine.spec
    tokens = int(experience.mask.sum())
    engine.moments = experience.moments
    recovered(engine)
    progress.elapsed_s += window[1] - window[0]
    progress.generated_tokens += tokens
    spans, waits = engine.trace.take()
    tail_rows = max(1, int(TAIL_SHARE * engine.pool.capacity))
    trace = StepTrace(engine.layout.devices, spans, waits, window, tail_rows)
    metrics = metrics | _step_metrics(engine, experience) | trace.metrics(tokens)
    metrics |= engine.hardware.take() | _utilization(engine, batch, metrics)
    # Normalised scores have mean 0 by and by, whatever was learned: then the raw ones tell how well the run does.
    judged = "critic/score/mean" if spec.ppo.normalize_scores == "off" else "critic/raw_score/mean"
    engine.run_score.add_step(metrics[judged], metrics["objective/kl"])
    metrics = engine.run_score.last_metrics = metrics | engine.run_score.pending_metrics
    _tell(engine)
    if progress.step % spec.logging.spans_every == 0:
        carried = deferred_rows(batch.sequences, engine.pool.sequences, batch.ends, batch.decode, engine.origin)
        trained = [(s.sequence_id, len(s.prompt), s.length) for s in batch.sequences]
        told = trace.event(progress.step, engine.origin, carried, _counters(engine, batch, window[0]))
        engine.journal.write("spans", **told, trained=trained)
    report_shrunk_passes(engine)
    _samples(engine, experience)
    _steer(engine, experience, (window[1] - window[0] - metrics.get("timing_s/eval", 0.0)) / tokens)


def _utilization(engine: Engine, batch: StepState, metrics: dict[str, float]) -> dict[str, float]:
    """Operations of the actor's update, attention left out, as a share of what the GPU's vendor states; nothing where unknown.

    A weight costs 2 a token forward and 4 backward, of which 2 are the weight's own gradient, which a frozen one has not.
    """
    seconds = metrics.get("timing_s/update_actor", 0.0) + metrics.get("timing_s/adv", 0.0)
    if engine.hardware.flops_per_s is None or not seconds:
        return {}
    tokens = sum(len(s.prompt) + s.length for s in batch.sequences) * engine.spec.ppo.epochs
    operations = (4 if engine.spec.models.lora is not None else 6) * engine.parameters * tokens
    return {"perf/mfu/actor": operations / (seconds * engine.hardware.flops_per_s)}


def reemit_step(engine: Engine) -> None:
    """Tell the last step once more, with an evaluation that came after it; where there is no step, tell that in the log."""
    run_score = engine.run_score
    if not run_score.pending_metrics:
        return
    if engine.progress.step:
        run_score.last_metrics |= run_score.pending_metrics
        _tell(engine)
    else:
        lines = ["Evaluated before step 1:", *(f"{name}: {value:.6g}" for name, value in run_score.pending_metrics.items())]
        engine.journal.write("log", stream="stdout", lines=lines)
        run_score.pending_metrics = {}


def report_shrunk_passes(engine: Engine) -> None:
    """Tell of passes that ran out of memory, on any rank: each makes its own smaller, and the first tells of all."""
    record_shrunk_passes(engine)
    several, mine = engine.ranks.world > 1, engine.trace.take_shrunk()
    for rank, told in enumerate(engine.ranks.all_gather(json.dumps(mine).encode())):
        for short in map(Shrunk._make, json.loads(told)):
            reason = f"rank {rank}: {short.reason}" if several else short.reason
            step = engine.progress.step
            engine.journal.write("decision", step=step, controller="memory", old=short.old, new=short.new, reason=reason)


def record_shrunk_passes(engine: Engine) -> None:
    """Remember what passes of this rank may have now: a resumed run goes on with that."""
    engine.progress.passes |= {short.passes: short.new for short in engine.trace.shrunk}


def _tell(engine: Engine) -> None:
    progress, run_score = engine.progress, engine.run_score
    run_score.pending_metrics = {}
    engine.journal.write(
        "step", step=progress.step, elapsed_s=progress.elapsed_s, generated_tokens=progress.generated_tokens,
        device_seconds=progress.elapsed_s * engine.spec.resources.devices, metrics=run_score.last_metrics,
    )  # fmt: skip


def _step_metrics(engine: Engine, experience: Experience) -> dict[str, float]:
    """What the batch and the pool tell, by the names of docs/metrics.md; time is the trace's matter."""
    progress, spec = engine.progress, engine.spec
    metrics = experience_metrics(experience, progress.kl_coefficient, spec.rollout.max_new_tokens)
    overcommit, deferred = engine.ranks.total([engine.pool.overcommit, len(engine.pool.sequences)])
    metrics |= overlap_metrics(experience, overcommit, engine.chunk.current, deferred, engine.cohorts)
    if spec.ppo.has_critic:
        metrics |= value_metrics(experience)
    if spec.overlap.inter_step == "tail_batch":
        told = tail_batch_metrics(engine.pool)
        metrics |= dict(zip(told, engine.ranks.total(told.values()), strict=True))
    if engine.decoder.rounds:
        metrics["decode_occupancy"] = engine.decoder.decoded / (engine.decoder.rounds * engine.pool.capacity)
    return metrics | {"oppo/nonfinite_steps": float(progress.nonfinite_steps)}


def _counters(engine: Engine, batch: StepState, start: float) -> dict[Counter, Samples]:
    """Δ and C in this step, and the answers that have finished in it."""
    return {
        "overcommit": [(start, float(engine.pool.overcommit))],
        "chunk_size": [(start, float(engine.chunk.current))],
        "finished": running_total([(start, 0.0), *((end, 1.0) for end in batch.ends.values())]),
    }


def _samples(engine: Engine, experience: Experience) -> None:
    if not engine.ranks.first:
        return
    rows = []
    for index, sequence in enumerate(experience.sequences[: engine.spec.logging.samples_per_step]):
        stale = int(experience.stale[index].sum())
        rows.append(
            {
                "sequence_id": sequence.sequence_id, "prompt": engine.codec.decode(sequence.prompt.tolist()),
                "response": engine.codec.decode(sequence.response),
                "stale_response": engine.codec.decode(sequence.response[:stale]),
                "ending": sequence.ending,
                "score": float(experience.scores[index]), "kl": float(experience.kl[index].sum()), "length": sequence.length,
                "age": sequence.age, "versions": (sequence.token_versions[0], sequence.token_versions[-1]),
            }
        )  # fmt: skip
    if rows:
        engine.journal.write("samples", step=engine.progress.step, samples=rows)


def _steer(engine: Engine, experience: Experience, seconds_per_token: float) -> None:
    spec, progress = engine.spec, engine.progress
    # Normalised scores would have no slope, and the answers of one group are not independent.
    scores = experience.raw_scores.view(-1, spec.ppo.group_size).mean(-1)
    if spec.overlap.inter_step == "defer":
        error = float(scores.std(unbiased=True)) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0
        _decided(engine, "overcommit", adjust_overcommit(engine.overcommit, spec.overlap.overcommit, float(scores.mean()), error))
    _decided(engine, "chunk", adjust_chunk(engine.chunk, spec.overlap.chunk, spec.rollout.max_new_tokens, seconds_per_token))
    if spec.ppo.kl.controller == "adaptive":
        per_token = float(experience.kl[experience.mask].mean())
        progress.kl_coefficient = adapted_kl_coefficient(
            progress.kl_coefficient, per_token, spec.ppo.kl.target, spec.ppo.rows, spec.ppo.kl.horizon
        )


def _decided(engine: Engine, controller: str, decision: Decision | None) -> None:
    """A kept value is told once a window at most: only changes and conclusions are worth a row."""
    if decision is not None and (decision.new != decision.old or controller == "chunk"):
        engine.journal.write(
            "decision",
            step=engine.progress.step,
            controller=controller,
            old=decision.old,
            new=decision.new,
            reason=decision.reason,
        )
