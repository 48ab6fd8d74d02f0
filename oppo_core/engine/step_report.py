"""Reports a step: metrics, `step`, `spans` and `samples` events, and the controllers' decisions for the next step."""

from __future__ import annotations

import json
import math
from typing import Any

from oppo_contract.events import MAX_EVENT_BYTES, Counter
from oppo_core.control.controllers import Decision, adjust_chunk, adjust_overcommit
from oppo_core.control.run_score import Health
from oppo_core.engine.state import Engine
from oppo_core.models.hub import pinned_models
from oppo_core.models.oom_retry import Shrunk
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.losses import adapted_kl_coefficient
from oppo_core.reporting.metrics import experience_metrics, overlap_metrics, tail_batch_metrics, uniform_groups, value_metrics
from oppo_core.rollout.step_state import StepState
from oppo_core.trace.step_trace import Samples, StepTrace, deferred_rows, running_total

SAMPLES_BYTES = MAX_EVENT_BYTES // 2
# Decoding with at most this share of B+Δ rows is the tail.
TAIL_SHARE = 0.25


def started(engine: Engine) -> None:
    """Write the `started` event after all ranks have loaded. Its time is the origin of all span times."""
    engine.ranks.any(False)
    engine.origin = engine.clock()
    engine.journal.write(
        "started", devices=engine.layout.devices, lanes=engine.layout.lanes(),
        start_step=engine.progress.step, total_steps=engine.spec.steps, provenance=engine.provenance,
        commits=pinned_models(engine.spec),
    )  # fmt: skip
    if engine.changes:
        lines = ["Resumed with settings that differ from the checkpoint's:", *map(str, engine.changes)]
        engine.journal.write("log", stream="stdout", lines=lines)


def finish_step(
    engine: Engine, batch: StepState, experience: Experience, metrics: dict[str, float], window: tuple[float, float]
) -> None:
    """Report a finished step and update Δ, C and the KL coefficient for the next one. `window`: its start and end."""
    progress, spec = engine.progress, engine.spec
    tokens = experience.batch.tokens
    engine.moments = experience.moments
    if progress.step > progress.nonfinite_at:
        progress.nonfinite_row = 0
    progress.elapsed_s += window[1] - window[0]
    progress.generated_tokens += tokens
    spans, waits = engine.trace.take()
    tail_rows = max(1, int(TAIL_SHARE * engine.pool.capacity / engine.ranks.world))
    trace = StepTrace(engine.layout.devices, spans, waits, window, tail_rows)
    metrics = metrics | _step_metrics(engine, batch, experience) | trace.metrics(tokens)
    metrics |= engine.hardware.take() | _utilization(engine, batch, metrics)
    metrics |= engine.cpu_time.take() if engine.cpu_time is not None else {}
    # Normalized scores converge to mean 0 whatever was learned.
    score_name = "critic/score/mean" if spec.ppo.normalize_scores == "off" else "critic/raw_score/mean"
    engine.run_score.add_step(metrics[score_name], _health(metrics))
    metrics = engine.run_score.last_metrics = metrics | engine.run_score.pending_metrics
    _write_step(engine)
    if progress.step % spec.logging.spans_every == 0:
        carried = deferred_rows(batch.sequences, engine.pool.sequences, batch.ends, batch.decode, engine.origin)
        trained = [(s.sequence_id, len(s.prompt), s.length) for s in batch.sequences]
        spans_event = trace.event(progress.step, engine.origin, carried, _counters(engine, batch, window[0]))
        engine.journal.write("spans", **spans_event, trained=trained)
    report_shrunk_passes(engine)
    _write_samples(engine, experience)
    # The ranks' clocks differ, and all must choose the same chunk size.
    seconds = engine.ranks.total([window[1] - window[0] - metrics.get("timing_s/eval", 0.0)])[0] / engine.ranks.world
    _run_controllers(engine, experience, seconds / tokens)


def _health(metrics: dict[str, float]) -> Health:
    """The step's values that stop conditions watch; no entropy while only the critic is trained."""
    return Health(metrics["objective/kl"], metrics.get("actor/entropy", math.nan), metrics["response/repetition"])


def _utilization(engine: Engine, batch: StepState, metrics: dict[str, float]) -> dict[str, float]:
    """MFU of the actor's update, attention not counted; empty if the GPU's peak FLOP/s are unknown.

    Per token, a weight costs 2 FLOP forward and 4 backward. A frozen weight costs 2 less, because it has no gradient.
    """
    seconds = metrics.get("timing_s/update_actor", 0.0) + metrics.get("timing_s/adv", 0.0)
    if engine.hardware.flops_per_s is None or not seconds:
        return {}
    tokens = sum(len(s.prompt) + s.length for s in engine.local(batch.sequences)) * engine.spec.ppo.epochs
    operations = (4 if engine.spec.models.lora is not None else 6) * engine.parameters * tokens
    return {"perf/mfu/actor": operations / (seconds * engine.hardware.flops_per_s)}


def reemit_step(engine: Engine) -> None:
    """Write the last `step` event again, with the metrics of a later evaluation. Before the first step, write them to the log."""
    run_score = engine.run_score
    if not run_score.pending_metrics:
        return
    if engine.progress.step:
        run_score.last_metrics |= run_score.pending_metrics
        _write_step(engine)
    else:
        lines = ["Evaluated before step 1:", *(f"{name}: {value:.6g}" for name, value in run_score.pending_metrics.items())]
        engine.journal.write("log", stream="stdout", lines=lines)
        run_score.pending_metrics = {}


def report_shrunk_passes(engine: Engine) -> None:
    """Write a `decision` event for each pass budget that an OOM retry reduced, on any rank."""
    record_shrunk_passes(engine)
    payload = json.dumps(engine.trace.take_shrunk()).encode()
    for rank, rows in enumerate(engine.ranks.all_gather(payload)):
        prefix = f"rank {rank}: " if engine.ranks.world > 1 else ""
        for shrunk in map(Shrunk._make, json.loads(rows)):
            engine.journal.write(
                "decision", step=engine.progress.step, controller="memory", old=shrunk.old, new=shrunk.new,
                reason=prefix + shrunk.reason,
            )  # fmt: skip


def record_shrunk_passes(engine: Engine) -> None:
    """Save this rank's reduced pass budgets for a resumed run."""
    engine.progress.passes |= {short.passes: short.new for short in engine.trace.shrunk}


def _write_step(engine: Engine) -> None:
    progress, run_score = engine.progress, engine.run_score
    run_score.pending_metrics = {}
    engine.journal.write(
        "step", step=progress.step, elapsed_s=progress.elapsed_s, generated_tokens=progress.generated_tokens,
        device_seconds=progress.elapsed_s * engine.spec.resources.devices, metrics=run_score.last_metrics,
    )  # fmt: skip


def _step_metrics(engine: Engine, batch: StepState, experience: Experience) -> dict[str, float]:
    """Metrics of the batch and the pool (docs/metrics.md), without times."""
    progress, spec = engine.progress, engine.spec
    metrics = experience_metrics(experience, progress.kl_coefficient, spec.rollout.max_new_tokens)
    pool = engine.pool
    metrics |= overlap_metrics(experience, pool.overcommit, engine.chunk.current, len(pool.sequences), engine.cohorts)
    if spec.ppo.has_critic:
        metrics |= value_metrics(experience)
    else:
        metrics["oppo/uniform_groups"] = float(uniform_groups(experience.scores, spec.ppo.group_size))
        metrics["oppo/replaced_groups"] = float(batch.replaced)
    if spec.overlap.inter_step == "tail_batch":
        metrics |= tail_batch_metrics(engine.pool)
    if engine.decoder.rounds:
        metrics["decode_occupancy"] = engine.decoder.decoded / (engine.decoder.rounds * engine.pool.capacity)
    return metrics | {"oppo/nonfinite_steps": float(progress.nonfinite_steps)}


def _counters(engine: Engine, batch: StepState, start: float) -> dict[Counter, Samples]:
    """Counter tracks of the step: Δ, C, and finished responses."""
    return {
        "overcommit": [(start, float(engine.pool.overcommit))],
        "chunk_size": [(start, float(engine.chunk.current))],
        "finished": running_total([(start, 0.0), *((end, 1.0) for end in batch.ends.values())]),
    }


def _write_samples(engine: Engine, experience: Experience) -> None:
    """Write the first rows of the batch. Each rank sends its own to rank 0."""
    rows = []
    for row, (place, sequence) in enumerate(zip(experience.batch.places, experience.sequences, strict=True)):
        if place >= engine.spec.logging.samples_per_step:
            break
        stale = int(experience.stale[row].sum())
        rows.append(
            {
                **engine.sampled_prompt(sequence), "sequence_id": sequence.sequence_id,
                "response": engine.codec.decode(sequence.response),
                "stale_response": engine.codec.decode(sequence.response[:stale]),
                "ending": sequence.ending, "score": float(experience.scores[place]),
                "kl": float(experience.kl_sums[place]), "length": sequence.length,
                "age": sequence.age, "versions": (sequence.token_versions[0], sequence.token_versions[-1]),
            }
        )  # fmt: skip
    if engine.ranks.world > 1:
        payloads = engine.ranks.all_gather(json.dumps(rows).encode())
        rows = sorted((row for payload in payloads for row in json.loads(payload)), key=lambda row: int(row["sequence_id"]))
    if engine.ranks.first:
        write_samples(engine, rows)


def write_samples(engine: Engine, rows: list[dict[str, Any]]) -> None:
    """Write samples as events of about `SAMPLES_BYTES`: a supervisor drops an event above `MAX_EVENT_BYTES`."""
    part, size = list[dict[str, Any]](), 0
    for row in rows:
        length = len(json.dumps(row))
        if part and size + length > SAMPLES_BYTES:
            engine.journal.write("samples", step=engine.progress.step, samples=part)
            part, size = [], 0
        part.append(row)
        size += length
    if part:
        engine.journal.write("samples", step=engine.progress.step, samples=part)


def _run_controllers(engine: Engine, experience: Experience, seconds_per_token: float) -> None:
    spec, progress = engine.spec, engine.progress
    if spec.overlap.inter_step == "defer":  # raw scores, because normalized ones have no slope
        decision = adjust_overcommit(engine.overcommit, spec.overlap.overcommit, float(experience.raw_scores.mean()))
        _write_choice(engine, "overcommit", decision)
    _write_choice(engine, "chunk", adjust_chunk(engine.chunk, spec.overlap.chunk, spec.rollout.max_new_tokens, seconds_per_token))
    if spec.ppo.kl.controller == "adaptive":
        per_token = float(experience.kl_sums.sum()) / experience.batch.tokens
        progress.kl_coefficient = adapted_kl_coefficient(
            progress.kl_coefficient, per_token, spec.ppo.kl.target, spec.ppo.rows, spec.ppo.kl.horizon
        )


def _write_choice(engine: Engine, controller: str, decision: Decision | None) -> None:
    """Write a controller's decision; unchanged values only for the chunk size, whose trial ends with one."""
    if decision is not None and (decision.new != decision.old or controller == "chunk"):
        engine.journal.write(
            "decision", step=engine.progress.step, controller=controller, old=decision.old, new=decision.new,
            reason=decision.reason,
        )  # fmt: skip
