"""Runs evaluations on schedule and records their scores, metrics and samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_contract.spec import RunSpec
from oppo_core.control.stop_conditions import ASKED_TO_STOP
from oppo_core.engine import step_report
from oppo_core.engine.state import Engine
from oppo_core.ppo.reward_shaping import shaped_scores
from oppo_core.reporting.metrics import spread
from oppo_core.rollout.held_out import HELD_OUT_OFFSET, Evaluator, never, saved_fields
from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.scorers import SequenceDelta
from oppo_core.training.optimizer import NonFiniteError

BEFORE, AFTER = "eval/start", "eval"


def evaluate_when_due(engine: Engine, should_stop: Callable[[], bool]) -> None:
    """Evaluate the present weights every `evaluation.every_steps` steps and at the end of the run, once each.

    The metrics wait in `engine.run_score` for the next `step` event. A stop leaves the evaluation `unfinished`.

    Raises:
        NonFiniteError: a score is NaN or infinite, and `ppo.on_nonfinite` is raise.
    """
    evaluation, version = engine.spec.evaluation, engine.progress.step
    if evaluation is not None and (version % evaluation.every_steps == 0 or version == engine.spec.steps):
        _evaluate_once(engine, should_stop)


def evaluate_first(engine: Engine, should_stop: Callable[[], bool]) -> bool:
    """Evaluate before the first step: the untrained weights, an interrupted evaluation, or one that a changed spec asks for.

    Returns:
        Whether an interrupted evaluation is now complete, so that what follows a step (a checkpoint) is still to do.
    """
    run_score = engine.run_score
    interrupted, before = run_score.unfinished, run_score.evaluated
    if engine.evaluator is None:
        run_score.unfinished = False
    elif interrupted:
        _evaluate_once(engine, should_stop)
    elif engine.batch is None and run_score.evaluated < 0:
        evaluate_when_due(engine, should_stop)
    if engine.progress.step > 0 and run_score.evaluated != before:
        step_report.reemit_step(engine)
    return interrupted and engine.progress.step > 0 and not run_score.unfinished


def evaluate_last(engine: Engine, reason: str, should_stop: Callable[[], bool]) -> str:
    """Evaluate the last weights, unless the run was asked to stop. Returns why the run ends."""
    if reason == ASKED_TO_STOP:
        return reason
    start = engine.clock()
    _evaluate_once(engine, should_stop)
    engine.progress.elapsed_s += engine.clock() - start
    step_report.reemit_step(engine)
    return ASKED_TO_STOP if engine.run_score.unfinished else reason


def _evaluate_once(engine: Engine, should_stop: Callable[[], bool]) -> None:
    """Evaluate the present weights, unless they were evaluated already."""
    version, run_score, start = engine.progress.step, engine.run_score, engine.clock()
    if engine.evaluator is None or run_score.evaluated == version:
        return
    result = evaluate(engine, engine.evaluator, should_stop)
    run_score.unfinished, engine.saved = result is None, None
    if result is None:
        return
    answers, scores = result
    _record_score(engine, scores)
    name = BEFORE if version == 0 else AFTER
    run_score.pending_metrics |= evaluation_metrics(name, answers, scores, engine.spec) | {
        "timing_s/eval": engine.clock() - start
    }
    _samples(engine, answers, scores)


def _record_score(engine: Engine, scores: NDArray[np.float64]) -> None:
    """Record the evaluation's score if every score is finite; otherwise follow `ppo.on_nonfinite`."""
    version, run_score = engine.progress.step, engine.run_score
    run_score.evaluated, run_score.evaluation = version, float(scores.mean())
    faults = np.flatnonzero(~np.isfinite(scores))
    if not len(faults):
        return
    run_score.evaluation = None
    reason = f"the evaluation after step {version}: the score of held-out answer {faults[0]} is not finite; check the reward"
    if engine.spec.ppo.on_nonfinite == "raise":
        raise NonFiniteError(reason)
    engine.journal.write("decision", step=version, controller="nonfinite", old=version, new=version, reason=reason)


def evaluate(
    engine: Engine, evaluator: Evaluator, should_stop: Callable[[], bool] = never
) -> tuple[list[Sequence], NDArray[np.float64]] | None:
    """Responses to the held-out prompts with their scores [N], shaped as in training but not normalized by running moments.

    A score is NaN where the reward is not finite. Returns None if `should_stop` became true before all were decoded.
    """
    engine.use_cores(engine.layout.decode_threads)
    with engine.trace.span("actor", "eval", rows=len(evaluator.prompts)):
        answers = evaluator.answers(engine.progress.step, engine.chunk.current, should_stop)
    engine.use_cores(len(engine.layout.actor_devices))
    if engine.on_any_rank(answers is None):
        return None
    assert answers is not None
    engine.scorers.start_evaluate(
        [
            SequenceDelta(HELD_OUT_OFFSET + s.sequence_id, len(s.prompt), s.tokens(), finished=True, stopped=s.stopped)
            for s in answers
        ]
    )
    with engine.trace.wait("eval"):
        scores = engine.scorers.wait_evaluate()
    answers, raw = _of_all_ranks(engine, answers, [scores[HELD_OUT_OFFSET + s.sequence_id] for s in answers])
    plain = engine.spec.ppo.model_copy(update={"normalize_scores": "off"})
    shaped = shaped_scores(raw, answers, plain, engine.moments)
    return answers, torch.where(raw.isfinite(), shaped, math.nan).numpy()


def _of_all_ranks(engine: Engine, answers: list[Sequence], scores: list[float]) -> tuple[list[Sequence], Tensor]:
    """The responses of all ranks in prompt order, and their raw scores [N] float64."""
    if engine.ranks.world > 1:
        rows = [(answer.sequence_id, score, saved_fields(answer)) for answer, score in zip(answers, scores, strict=True)]
        with engine.trace.wait("tail"):
            payloads = engine.ranks.all_gather(json.dumps(rows).encode())
        assert engine.evaluator is not None
        prompts = engine.evaluator.prompts
        merged: list[Any] = sorted((row for text in payloads for row in json.loads(text)), key=lambda row: int(row[0]))
        answers, scores = [Sequence(n, n, prompts[n], **row) for n, _, row in merged], [score for _, score, _ in merged]
    return answers, torch.tensor(scores, dtype=torch.float64)


def evaluation_metrics(name: str, answers: list[Sequence], scores: NDArray[np.float64], spec: RunSpec) -> dict[str, float]:
    """Metrics `name`/score/… and `name`/response_length/…"""
    lengths = np.asarray([s.length for s in answers], dtype=np.float64)
    error = float(scores.std(ddof=1)) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan
    metrics = spread(f"{name}/score", scores) | {f"{name}/score/standard_error": error}
    return metrics | {
        f"{name}/response_length/mean": float(lengths.mean()),
        f"{name}/response_length/clip_ratio": float((lengths >= spec.rollout.max_new_tokens).mean()),
    }


def _samples(engine: Engine, answers: list[Sequence], scores: NDArray[np.float64]) -> None:
    version, rows = engine.progress.step, []
    for sequence, score in list(zip(answers, scores.tolist(), strict=True))[: engine.spec.logging.samples_per_step]:
        rows.append(
            {
                **engine.sampled_prompt(sequence), "sequence_id": sequence.sequence_id,
                "response": engine.codec.decode(sequence.response), "stale_response": "",
                "ending": sequence.ending, "score": score, "kl": 0.0, "length": sequence.length, "age": 0,
                "versions": (version, version), "held_out": True,
            }
        )  # fmt: skip
    step_report.write_samples(engine, rows)
