"""Evaluation: held-out prompts, answered and scored every n steps, beside training and without touching it.

The answers have a decoder and random numbers of their own (`Use.EVALUATION`), the same in each evaluation, so that two
evaluations differ by the weights alone. The reward reads them whole and forgets them; controllers do not see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from oppo_contract.spec import RunSpec
from oppo_core.metrics import spread
from oppo_core.models.folder import find
from oppo_core.models.protocol import Network
from oppo_core.ppo.shaping import raw_scores, shaped_scores
from oppo_core.randomness import Use
from oppo_core.rollout.decoder import Decoder, DecodeSettings
from oppo_core.rollout.prompts import read_prompts
from oppo_core.rollout.sampling import Filters
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.stops import StopConditions
from oppo_core.rollout.tokens import TextCodec
from oppo_core.scoring.results import Scored
from oppo_core.scoring.scorers import Growth

if TYPE_CHECKING:
    from oppo_core.engine import Engine

# The scorers know held-out answers by numbers that no training answer will have.
APART = 1 << 48
BEFORE, AFTER = "eval/start", "eval"


@dataclass(slots=True)
class Evaluator:
    """The held-out prompts, and how to make a decoder that answers `rows` of them at a time."""

    prompts: list[NDArray[np.int64]]
    rows: int
    decoder: Callable[[], Decoder]

    def answers(self, version: int) -> list[Sequence]:
        """An answer to every prompt, numbered as the prompts are, under the weights of `version`."""
        decoder = self.decoder()
        answers = [Sequence(number, number, prompt) for number, prompt in enumerate(self.prompts)]
        for first in range(0, len(answers), self.rows):
            decoder.begin(answers[first : first + self.rows], version)
            while decoder.live:
                decoder.round(version)
        return answers


def evaluator_of(
    spec: RunSpec,
    roots: list[Path],
    network: Network,
    codec: TextCodec,
    settings: DecodeSettings,
    stops: Callable[[], StopConditions | None],
) -> Evaluator | None:
    """What evaluates, when the spec asks for it; `settings` are the training decoder's, `stops` makes its stop conditions.

    Raises:
        ModelFolderError, PromptError: the held-out prompts are missing or cannot be used.
    """
    asked = spec.evaluation
    if asked is None:
        return None
    path = find(asked.prompts, roots)
    longest = spec.rollout.max_prompt_tokens
    prompts = read_prompts(path, asked.prompt_field, codec, longest, "evaluation.prompt_field")[: asked.count]
    rows = min(len(prompts), spec.ppo.rows)
    given = replace(settings, use=Use.EVALUATION, rates_stale=False, keeps_cache=False)
    if asked.greedy:
        given = replace(given, filters=Filters(top_k=1, top_p=None, min_p=None))
    return Evaluator(prompts, rows, lambda: Decoder(network, given, rows, stops=stops()))


def evaluate_when_due(engine: Engine, name: str = AFTER) -> None:
    """Evaluate the present weights every `evaluation.every_steps` steps and at the run's end; once each.

    The metrics `name`/… wait in `engine.standing` for the next `step` event.
    """
    asked, version, standing = engine.spec.evaluation, engine.progress.step, engine.standing
    if engine.evaluator is None or asked is None or version == standing.evaluated:
        return
    if version % asked.every_steps == 0 or version == engine.spec.steps:
        start = engine.clock()
        answers, scores = evaluate(engine, engine.evaluator)
        standing.evaluated, standing.evaluation = version, float(scores.mean())
        standing.untold |= evaluation_metrics(name, answers, scores, engine.spec) | {"timing_s/eval": engine.clock() - start}
        _samples(engine, answers, scores)


def evaluate(engine: Engine, evaluator: Evaluator) -> tuple[list[Sequence], NDArray[np.float64]]:
    """Answers to the held-out prompts and their scores, shaped as in training but never normalised by running moments."""
    engine.use_cores(engine.layout.decode_threads)
    with engine.trace.span("actor", "eval", rows=len(evaluator.prompts)):
        answers = evaluator.answers(engine.progress.step)
        told = [Growth(APART + s.sequence_id, len(s.prompt), s.tokens(), finished=True, stopped=s.stopped) for s in answers]
    engine.use_cores(len(engine.layout.actor_devices))
    engine.scorers.start_judge(told)
    with engine.trace.wait("eval"):
        raw = engine.scorers.wait_judge()
    nothing = np.empty(0)
    rows = raw_scores(answers, [Scored(raw[APART + s.sequence_id], nothing, nothing) for s in answers])
    plain = engine.spec.ppo.model_copy(update={"normalize_scores": "off"})
    return answers, shaped_scores(rows, answers, plain, engine.moments).numpy()


def evaluation_metrics(name: str, answers: list[Sequence], scores: NDArray[np.float64], spec: RunSpec) -> dict[str, float]:
    """`name`/score/… and `name`/response_length/…"""
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
        prompt, response = (engine.codec.decode(ids) for ids in (sequence.prompt.tolist(), sequence.response))
        rows.append(
            {
                "sequence_id": sequence.sequence_id, "prompt": prompt, "response": response, "stale_response": "", "score": score,
                "kl": 0.0, "length": sequence.length, "age": 0, "versions": (version, version), "held_out": True,
            }
        )  # fmt: skip
    if rows:
        engine.journal.write("samples", step=version, samples=rows)
