"""Evaluation: held-out prompts, answered and scored every n steps, beside training and without touching it.

The answers have a decoder and random numbers of their own (`Use.EVALUATION`), the same in each evaluation, so that two
evaluations differ by the weights alone. The reward reads them whole and forgets them; controllers do not see them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_contract.spec import RunSpec
from oppo_core.distributed.process_group import ALONE, Ranks
from oppo_core.engine.run_score import ASKED_TO_STOP
from oppo_core.models.model_io import find
from oppo_core.models.protocol import Network
from oppo_core.ppo.optimizer import NonFiniteError
from oppo_core.ppo.reward_shaping import shaped_scores
from oppo_core.reporting import step_report
from oppo_core.reporting.metrics import spread
from oppo_core.rng import Use
from oppo_core.rollout.decoder import Decoder, DecodeSettings
from oppo_core.rollout.device_decoder import decoder_of
from oppo_core.rollout.prompts import read_prompts
from oppo_core.rollout.sampling import Filters
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.stop_conditions import StopConditions
from oppo_core.rollout.tokenizer import TextCodec
from oppo_core.scoring.scorers import Growth

if TYPE_CHECKING:
    from oppo_core.engine.build import Engine

# The scorers know held-out answers by numbers that no training answer will have.
APART = 1 << 48
BEFORE, AFTER = "eval/start", "eval"
KEPT_FIELDS = ("response", "behaviour_logprobs", "token_versions", "finished", "ended_by_eos", "stopped")


def never() -> bool:
    """Nobody asks to stop."""
    return False


@dataclass(slots=True)
class Answering:
    """Answers in the making, and the decoder that writes some of them."""

    answers: list[Sequence]
    decoder: Decoder


@dataclass(slots=True)
class Evaluator:
    """The held-out prompts, and how to make a decoder that answers `rows` of them at a time.

    Of `world` ranks each answers every `world`-th prompt: this is `rank`'s.
    """

    prompts: list[NDArray[np.int64]]
    rows: int
    decoder: Callable[[], Decoder]
    under_way: Answering | None = None
    rank: int = 0
    world: int = 1

    def answers(self, version: int, chunk: int, should_stop: Callable[[], bool] = never) -> list[Sequence] | None:
        """An answer to every prompt of this rank's, numbered as the prompts are, under the weights of `version`.

        None when `should_stop` was true after a chunk of so many rounds; the next call goes on where this one ended.
        """
        now = self.under_way = self.under_way or Answering(self._blank(), self.decoder())
        while not self._chunk(now, chunk, version):
            if should_stop():
                return None
        self.under_way = None
        return now.answers

    def _chunk(self, now: Answering, rounds: int, version: int) -> bool:
        """Decode so many rounds at most; returns whether all is answered."""
        if not now.decoder.live and (due := [answer for answer in now.answers if not answer.finished]):
            now.decoder.begin(due[: self.rows], version)
        while rounds and now.decoder.live:
            now.decoder.round(version)
            rounds -= 1
        return all(answer.finished for answer in now.answers)

    def _blank(self) -> list[Sequence]:
        numbers = range(self.rank, len(self.prompts), self.world)
        return [Sequence(number, number, self.prompts[number]) for number in numbers]

    def saved(self) -> list[dict[str, Any]] | None:
        """The answers in the making, as plain data; None where no evaluation is under way."""
        return [_kept(answer) for answer in self.under_way.answers] if self.under_way is not None else None

    def resume(self, saved: list[dict[str, Any]]) -> None:
        """Take back what `saved` gave; `answers` goes on with these, read anew."""
        answers = [replace(blank, **row) for blank, row in zip(self._blank(), saved, strict=True)]
        self.under_way = Answering(answers, self.decoder())


def evaluator_of(
    spec: RunSpec,
    roots: list[Path],
    network: Network,
    codec: TextCodec,
    settings: DecodeSettings,
    stops: Callable[[], StopConditions | None],
    ranks: Ranks = ALONE,
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
    rows = min(math.ceil(len(prompts) / ranks.world), spec.ppo.rows // ranks.world)
    given = replace(settings, use=Use.EVALUATION, rates_stale=False, keeps_cache=False)
    if asked.greedy:
        given = replace(given, filters=Filters(top_k=1, top_p=None, min_p=None))
    return Evaluator(prompts, rows, lambda: decoder_of(network, given, rows, stops()), rank=ranks.rank, world=ranks.world)


def evaluate_when_due(engine: Engine, should_stop: Callable[[], bool]) -> None:
    """Evaluate the present weights every `evaluation.every_steps` steps and at the run's end; once each.

    The metrics wait in `engine.standing` for the next `step` event. When a stop cuts it off, it is `unfinished`.

    Raises:
        NonFiniteError: a score is NaN or infinite, and `ppo.on_nonfinite` is raise.
    """
    asked, version = engine.spec.evaluation, engine.progress.step
    if asked is not None and (version % asked.every_steps == 0 or version == engine.spec.steps):
        _evaluate_once(engine, should_stop)


def evaluate_first(engine: Engine, should_stop: Callable[[], bool]) -> bool:
    """Evaluate the untrained weights, or what a stop has cut off, or whatever a changed spec wants evaluated otherwise.

    Returns:
        Whether an evaluation that a stop had cut off is settled now; what follows a step has not been done yet.
    """
    standing = engine.standing
    owed, before = standing.unfinished, standing.evaluated
    if engine.evaluator is None:
        standing.unfinished = False
    elif owed:
        _evaluate_once(engine, should_stop)
    elif engine.batch is None and standing.evaluated < 0:
        evaluate_when_due(engine, should_stop)
    if engine.progress.step > 0 and standing.evaluated != before:
        step_report.tell_again(engine)
    return owed and engine.progress.step > 0 and not standing.unfinished


def evaluate_last(engine: Engine, reason: str, should_stop: Callable[[], bool]) -> str:
    """However the run ends, unless it was asked to stop: its last weights are evaluated, and told. Returns why it ends."""
    if reason == ASKED_TO_STOP:
        return reason
    start = engine.clock()
    _evaluate_once(engine, should_stop)
    engine.progress.elapsed_s += engine.clock() - start
    step_report.tell_again(engine)
    return ASKED_TO_STOP if engine.standing.unfinished else reason


def _evaluate_once(engine: Engine, should_stop: Callable[[], bool]) -> None:
    """Evaluate the present weights, unless that was done."""
    version, standing, start = engine.progress.step, engine.standing, engine.clock()
    if engine.evaluator is None or standing.evaluated == version:
        return
    found = evaluate(engine, engine.evaluator, should_stop)
    standing.unfinished, engine.saved = found is None, None
    if found is None:
        return
    answers, scores = found
    _judge(engine, scores)
    name = BEFORE if version == 0 else AFTER
    standing.untold |= evaluation_metrics(name, answers, scores, engine.spec) | {"timing_s/eval": engine.clock() - start}
    _samples(engine, answers, scores)


def _judge(engine: Engine, scores: NDArray[np.float64]) -> None:
    """Let the run stand by these scores, if all are finite; otherwise by none, and as `ppo.on_nonfinite` wants it."""
    version, standing = engine.progress.step, engine.standing
    standing.evaluated, standing.evaluation = version, float(scores.mean())
    faults = np.flatnonzero(~np.isfinite(scores))
    if not len(faults):
        return
    standing.evaluation = None
    reason = f"the evaluation after step {version}: the score of held-out answer {faults[0]} is not finite; look at the reward"
    if engine.spec.ppo.on_nonfinite == "raise":
        raise NonFiniteError(reason)
    engine.journal.write("decision", step=version, controller="nonfinite", old=version, new=version, reason=reason)


def evaluate(
    engine: Engine, evaluator: Evaluator, should_stop: Callable[[], bool] = never
) -> tuple[list[Sequence], NDArray[np.float64]] | None:
    """Answers to the held-out prompts and their scores, shaped as in training but never normalised by running moments.

    A score is NaN where the reward's is not finite. None when `should_stop` was true before all was answered.
    """
    engine.use_cores(engine.layout.decode_threads)
    with engine.trace.span("actor", "eval", rows=len(evaluator.prompts)):
        answers = evaluator.answers(engine.progress.step, engine.chunk.current, should_stop)
    engine.use_cores(len(engine.layout.actor_devices))
    if engine.on_any_rank(answers is None):
        return None
    assert answers is not None
    told = [Growth(APART + s.sequence_id, len(s.prompt), s.tokens(), finished=True, stopped=s.stopped) for s in answers]
    engine.scorers.start_judge(told)
    with engine.trace.wait("eval"):
        judged = engine.scorers.wait_judge()
    answers, raw = _of_all_ranks(engine, answers, [judged[APART + s.sequence_id] for s in answers])
    plain = engine.spec.ppo.model_copy(update={"normalize_scores": "off"})
    shaped = shaped_scores(raw, answers, plain, engine.moments)
    return answers, torch.where(raw.isfinite(), shaped, math.nan).numpy()


def _of_all_ranks(engine: Engine, answers: list[Sequence], scores: list[float]) -> tuple[list[Sequence], Tensor]:
    """The answers of all ranks, numbered as the prompts are, and their raw scores [N] float64."""
    if engine.ranks.world > 1:
        own = [(answer.sequence_id, score, _kept(answer)) for answer, score in zip(answers, scores, strict=True)]
        with engine.trace.wait("tail"):
            told = engine.ranks.gather(json.dumps(own).encode())
        assert engine.evaluator is not None
        prompts = engine.evaluator.prompts
        rows: list[Any] = sorted((row for text in told for row in json.loads(text)), key=lambda row: int(row[0]))
        answers, scores = [Sequence(n, n, prompts[n], **row) for n, _, row in rows], [score for _, score, _ in rows]
    return answers, torch.tensor(scores, dtype=torch.float64)


def _kept(answer: Sequence) -> dict[str, Any]:
    """What an answer's score and its samples depend on."""
    return {name: getattr(answer, name) for name in KEPT_FIELDS}


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
