"""The reward model as a pooling model of vLLM's with a prefix cache, in a process of its own.

Each time an answer has grown by whole blocks, its prefix is read: vLLM finds the keys and values of the blocks before and
computes the new ones. What it says of an unfinished answer is thrown away, since only the cache is wanted; the finished one is
read last, of which the last block is computed in any case. One request of an answer is under way at a time, as only one that has
ended can be found. Blocks that were evicted are computed again, and counted: vLLM tells how many tokens of a request it found.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oppo_contract.model_folder import ModelFolderError, read_config
from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.protocol import Answer
from oppo_core.vllm.asyncio_thread import Loop
from oppo_core.vllm.engine_args import BLOCK_TOKENS
from oppo_core.vllm.protocols import Pooled, PoolingEngine

CLASSIFIER = "ForSequenceClassification"


@dataclass(slots=True, eq=False)
class Reading:
    """An answer with its prompt, as far as it is written.

    `read`: tokens in the whole blocks that vLLM has read. `known`, `found`: of all its requests, tokens that had been read
    before, and those of them that were still cached.
    """

    tokens: list[int]
    finished: bool = False
    read: int = 0
    known: int = 0
    found: int = 0
    under_way: bool = False
    over: bool = False

    def due(self) -> tuple[list[int], bool] | None:
        """What to read next, and whether it is the whole: all of a finished answer, of an unfinished one new whole blocks.

        None when there is nothing. Another thread writes: the tokens first, and then that they are all.
        """
        finished, tokens = self.finished, self.tokens
        whole = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        if self.over or (not finished and whole <= self.read):
            return None
        return (tokens, True) if finished else (tokens[:whole], False)

    def note(self, tokens: int, cached: int) -> None:
        """So many tokens were read, of which so many were found."""
        known = min(self.read, (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        self.known += known
        self.found += min(known, cached)
        self.read = tokens // BLOCK_TOKENS * BLOCK_TOKENS


def pooling_parameters() -> Any:
    """vLLM's `PoolingParams` for a raw score, which is told once it is there."""
    from vllm.pooling_params import PoolingParams

    return PoolingParams(**POOLING)


# The model's own number, not squeezed between 0 and 1.
POOLING = {"task": "classify", "use_activation": False}


class PrefixReward:
    """A `GrowingReward` (oppo_core/rewards/protocol.py) over a `PoolingEngine`."""

    elsewhere = True

    def __init__(self, engine: PoolingEngine, loop: Loop, parameters: Callable[[], Any] = pooling_parameters) -> None:
        """`loop` is where `engine` was made; both are closed with the reward."""
        self.engine = engine
        self._loop, self._parameters = loop, parameters
        self._readings: dict[int, Reading] = {}
        self._scores: dict[int, float] = {}
        self._numbers = count()
        self._news = threading.Condition()
        self._error: Exception | None = None
        self._latest = time.monotonic()

    def read_on(self, tokens: dict[int, NDArray[np.int64]]) -> None:
        for sequence_id, row in tokens.items():
            self._read(sequence_id, row.tolist(), finished=False)

    def start(self, answers: list[Answer], alive: Callable[[], None]) -> None:
        for answer in answers:
            self._read(answer.sequence_id, answer.prompt_ids + answer.response_ids, finished=True)

    def _read(self, sequence_id: int, tokens: list[int], finished: bool) -> None:
        reading = self._readings.setdefault(sequence_id, Reading([]))
        reading.tokens = tokens
        reading.finished = finished  # in this order: see `Reading.due`
        self._latest = time.monotonic()
        self._loop.start(self._follow(sequence_id, reading))

    async def _follow(self, sequence_id: int, reading: Reading) -> None:
        """In the loop's thread: read until there is nothing new. Whoever follows this answer already will see what is new."""
        if reading.under_way:
            return
        reading.under_way = True
        try:
            while (due := reading.due()) is not None:
                tokens, finished = due
                told = await self._ask(f"{sequence_id}.{next(self._numbers)}", tokens)
                reading.note(len(tokens), told.num_cached_tokens)
                self._tell(sequence_id, reading, _score_of(told) if finished else None)
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it was
            with self._news:
                self._error = error
                self._news.notify_all()
        finally:
            reading.under_way = False

    async def _ask(self, request_id: str, tokens: list[int]) -> Pooled:
        request = self.engine.encode({"prompt_token_ids": tokens}, self._parameters(), request_id)
        told: list[Pooled] = [output async for output in request]
        if not told or told[-1].error is not None:
            raise RewardError(f"vLLM's reward model did not read request {request_id}: {told and told[-1].error}")
        return told[-1]

    def _tell(self, sequence_id: int, reading: Reading, score: float | None) -> None:
        with self._news:
            self._latest = time.monotonic()
            if score is not None and not reading.over:
                self._scores[sequence_id] = score
                reading.over = True
                self._news.notify_all()

    def wait(self, sequence_ids: list[int], timeout_s: float) -> bool:
        """See `FinishedReward.wait`. An engine that is silent for too long is taken for hung."""
        with self._news:
            self._news.wait_for(lambda: self._error is not None or self._have(sequence_ids), timeout_s)
            if self._error is not None:
                error = self._error
                raise RewardError(f"vLLM's reward model failed: {type(error).__name__}: {error}") from error
            silent_s = time.monotonic() - self._latest
            if not self._have(sequence_ids) and silent_s > self._loop.silence_s:
                raise RewardError(
                    f"vLLM's reward model has told nothing for {silent_s:.0f} s, so it is taken for hung"
                    " (resources.longest_silence_s)"
                )
            return self._have(sequence_ids)

    def _have(self, sequence_ids: list[int]) -> bool:
        return all(i in self._scores for i in sequence_ids)

    def score(self, sequence_id: int) -> float:
        return self._scores[sequence_id]

    def cached(self, sequence_id: int) -> tuple[int, int]:
        reading = self._readings.get(sequence_id)
        return (reading.known, reading.found) if reading is not None else (0, 0)

    def forget(self, sequence_id: int) -> None:
        """See `FinishedReward.forget`. A request that is under way ends by itself, and nobody looks at it."""
        reading = self._readings.pop(sequence_id, None)
        with self._news:
            if reading is not None:
                reading.over = True
            self._scores.pop(sequence_id, None)

    def close(self) -> None:
        """See `FinishedReward.close`: vLLM's process ends."""
        self.engine.shutdown()
        self._loop.close()


def _score_of(told: Pooled) -> float:
    """Raises RewardError when it is not one number."""
    numbers = told.outputs.data.reshape(-1)
    if len(numbers) != 1:
        raise RewardError(f"vLLM's reward model gives {len(numbers)} numbers a text, not one")
    return float(numbers[0])


def check_classifier(folder: Path) -> None:
    """Raises ModelFolderError when vLLM would make something else of the model than one score a text."""
    config: dict[str, Any] = read_config(folder)
    names = config.get("architectures") or [""]
    labels = len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2)
    if not names[0].endswith(CLASSIFIER) or labels != 1:
        raise ModelFolderError(
            f"{folder} is {names[0] or 'of no architecture'} with {labels} labels; models.reward.served_by vllm needs a model for"
            f" sequence classification (…{CLASSIFIER}) with one; choose served_by torch"
        )
