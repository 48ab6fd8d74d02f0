"""Decodes held-out prompts for evaluation, without side effects on training.

Uses a separate decoder and random stream (`Use.EVALUATION`), equal in each evaluation, so that two evaluations differ by the
weights only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oppo_contract.spec import RunSpec
from oppo_core.distributed.process_group import SINGLE, Ranks
from oppo_core.models.protocol import Network
from oppo_core.rng import Use
from oppo_core.rollout.build import build_stop_conditions, decode_settings
from oppo_core.rollout.decoder import Decoder
from oppo_core.rollout.device_decoder import build_decoder
from oppo_core.rollout.prompts import prompt_files, read_prompts
from oppo_core.rollout.sampling import Filters
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.tokenizer import TextCodec
from oppo_estimate.memory import evaluation_rows

# Added to the ids of held-out responses in the scorers, so that they differ from those of training responses.
HELD_OUT_OFFSET = 1 << 48
SAVED_FIELDS = ("response", "behaviour_logprobs", "token_versions", "finished", "ended_by_eos", "stopped")


def never() -> bool:
    """Default `should_stop`."""
    return False


@dataclass(slots=True)
class Unfinished:
    """An unfinished evaluation: its responses, and the decoder of some of them."""

    answers: list[Sequence]
    decoder: Decoder


@dataclass(slots=True)
class Evaluator:
    """The held-out prompts, and a factory of decoders for `rows` of them at a time.

    Rank `rank` decodes the prompts `rank`, `rank` + `world`, ….
    """

    prompts: list[NDArray[np.int64]]
    rows: int
    decoder: Callable[[], Decoder]
    unfinished: Unfinished | None = None
    rank: int = 0
    world: int = 1

    def answers(self, version: int, chunk: int, should_stop: Callable[[], bool] = never) -> list[Sequence] | None:
        """A response to each prompt of this rank with the weights of `version`; its id is the prompt's index.

        Returns None if `should_stop` was true after a chunk of `chunk` tokens; the next call continues.
        """
        state = self.unfinished = self.unfinished or Unfinished(self._blank(), self.decoder())
        while not self._decode_chunk(state, chunk, version):
            if should_stop():
                return None
        state.decoder.pause()
        self.unfinished = None
        return state.answers

    def _decode_chunk(self, state: Unfinished, rounds: int, version: int) -> bool:
        """Decode at most `rounds` tokens per response; returns whether all are finished."""
        if not state.decoder.live and (due := [answer for answer in state.answers if not answer.finished]):
            state.decoder.begin(due[: self.rows], version)
        while rounds and state.decoder.live:
            state.decoder.round(version)
            rounds -= 1
        return all(answer.finished for answer in state.answers)

    def _blank(self) -> list[Sequence]:
        numbers = range(self.rank, len(self.prompts), self.world)
        return [Sequence(number, number, self.prompts[number]) for number in numbers]

    def saved(self) -> list[dict[str, Any]] | None:
        """The unfinished responses as plain data; None without an unfinished evaluation."""
        return [saved_fields(answer) for answer in self.unfinished.answers] if self.unfinished is not None else None

    def resume(self, saved: list[dict[str, Any]]) -> None:
        """Restore what `saved` returned; `answers` prefills and continues these responses."""
        answers = [replace(blank, **row) for blank, row in zip(self._blank(), saved, strict=True)]
        self.unfinished = Unfinished(answers, self.decoder())


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
    files, limit = prompt_files(requested, roots), spec.rollout.max_prompt_tokens
    setting, columns = "evaluation.prompt_field", requested.columns
    prompts = read_prompts(files, requested.prompt_field, codec, limit, setting, columns)[: requested.count]
    rows = evaluation_rows(spec, len(prompts))
    settings = replace(decode_settings(spec, codec), use=Use.EVALUATION, scores_stale_tokens=False, keeps_cache=False)
    if requested.greedy:
        settings = replace(settings, filters=Filters(top_k=1, top_p=None, min_p=None))

    def build() -> Decoder:
        return build_decoder(network, settings, rows, build_stop_conditions(spec, codec))

    return Evaluator(prompts, rows, build, rank=ranks.rank, world=ranks.world)


def saved_fields(answer: Sequence) -> dict[str, Any]:
    """The fields of a response that its score and its samples depend on."""
    return {name: getattr(answer, name) for name in SAVED_FIELDS}
