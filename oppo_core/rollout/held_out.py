"""Evaluation: held-out prompts, answered and scored every n steps, beside training and without touching it.

The answers have a decoder and random numbers of their own (`Use.EVALUATION`), the same in each evaluation, so that two
evaluations differ by the weights alone. The reward reads them whole and forgets them; controllers do not see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oppo_contract.model_folder import find
from oppo_contract.spec import RunSpec
from oppo_core.distributed.process_group import SINGLE, Ranks
from oppo_core.models.protocol import Network
from oppo_core.rng import Use
from oppo_core.rollout.build import build_stop_conditions, decode_settings
from oppo_core.rollout.decoder import Decoder
from oppo_core.rollout.device_decoder import build_decoder
from oppo_core.rollout.prompts import read_prompts
from oppo_core.rollout.sampling import Filters
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.tokenizer import TextCodec

# The scorers know held-out answers by numbers that no training answer will have.
HELD_OUT_OFFSET = 1 << 48
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
        return [saved_fields(answer) for answer in self.under_way.answers] if self.under_way is not None else None

    def resume(self, saved: list[dict[str, Any]]) -> None:
        """Take back what `saved` gave; `answers` goes on with these, read anew."""
        answers = [replace(blank, **row) for blank, row in zip(self._blank(), saved, strict=True)]
        self.under_way = Answering(answers, self.decoder())


def build_evaluator(
    spec: RunSpec, roots: list[Path], network: Network, codec: TextCodec, ranks: Ranks = SINGLE
) -> Evaluator | None:
    """The evaluator that the spec asks for, if any; it samples as in training unless `evaluation.greedy` is set.

    Raises:
        ModelFolderError, PromptError: the held-out prompts are missing or cannot be used.
    """
    requested = spec.evaluation
    if requested is None:
        return None
    path, limit = find(requested.prompts, roots), spec.rollout.max_prompt_tokens
    prompts = read_prompts(path, requested.prompt_field, codec, limit, "evaluation.prompt_field")[: requested.count]
    rows = min(math.ceil(len(prompts) / ranks.world), spec.ppo.rows // ranks.world)
    settings = replace(decode_settings(spec, codec), use=Use.EVALUATION, scores_stale_tokens=False, keeps_cache=False)
    if requested.greedy:
        settings = replace(settings, filters=Filters(top_k=1, top_p=None, min_p=None))

    def build() -> Decoder:
        return build_decoder(network, settings, rows, build_stop_conditions(spec, codec))

    return Evaluator(prompts, rows, build, rank=ranks.rank, world=ranks.world)


def saved_fields(answer: Sequence) -> dict[str, Any]:
    """The fields of a response that its score and its samples depend on."""
    return {name: getattr(answer, name) for name in KEPT_FIELDS}
