"""A reward model served by vLLM as a pooling model with prefix caching, in another process.

Whenever an answer has grown by whole blocks, its prefix is sent: vLLM reuses the cached blocks and prefills the new ones. Scores
of unfinished answers are discarded. An answer has one request in flight at a time, because only finished requests are cached.
Evicted blocks are computed again; `num_cached_tokens` counts the hits.
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

from oppo_contract.model_folder import CLASSIFIER, ModelFolderError, label_count, read_config
from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.protocol import Answer
from oppo_core.vllm.asyncio_thread import AsyncioThread
from oppo_core.vllm.build import START_TIMEOUT_S
from oppo_core.vllm.engine_args import Placement, vllm_environment
from oppo_core.vllm.protocols import Pooled, PoolingEngine


@dataclass(slots=True, eq=False)
class PrefixState:
    """A growing answer with its prompt. `block`: tokens per block of the prefix cache.

    `read`: tokens in whole blocks that vLLM has prefilled. `known`: over all requests, tokens that had been prefilled before;
    `hits`: those of them that were still cached. `over`: scored or no longer needed.
    """

    tokens: list[int]
    block: int
    finished: bool = False
    read: int = 0
    known: int = 0
    hits: int = 0
    in_flight: bool = False
    over: bool = False

    def due(self) -> tuple[list[int], bool] | None:
        """Tokens to send next, and whether they are the whole answer: of an unfinished answer only new whole blocks.

        None if there are none. Another thread sets `tokens` first and then `finished`.
        """
        finished, tokens = self.finished, self.tokens
        whole = len(tokens) // self.block * self.block
        if self.over or (not finished and whole <= self.read):
            return None
        return (tokens, True) if finished else (tokens[:whole], False)

    def note(self, tokens: int, cached: int) -> None:
        """Record a request of `tokens` tokens, `cached` of which were in the prefix cache."""
        known = min(self.read, (tokens - 1) // self.block * self.block)
        self.known += known
        self.hits += min(known, cached)
        self.read = tokens // self.block * self.block


def pooling_parameters() -> Any:
    """vLLM's `PoolingParams` for a raw score."""
    from vllm.pooling_params import PoolingParams

    return PoolingParams(**POOLING)


# The logit, without an activation function.
POOLING = {"task": "classify", "use_activation": False}


class PrefixReward:
    """A `StreamingReward` (oppo_core/rewards/protocol.py) over a `PoolingEngine`."""

    is_remote = True

    def __init__(
        self, engine: PoolingEngine, loop: AsyncioThread, block_tokens: int, parameters: Callable[[], Any] = pooling_parameters
    ) -> None:
        """`loop` is the event loop of `engine`; both are closed with the reward. `block_tokens`: of its prefix cache."""
        self.engine = engine
        self._loop, self._block, self._parameters = loop, block_tokens, parameters
        self._states: dict[int, PrefixState] = {}
        self._scores: dict[int, float] = {}
        self._numbers = count()
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._last_progress = time.monotonic()

    def read_partial(self, tokens: dict[int, NDArray[np.int64]]) -> None:
        for sequence_id, row in tokens.items():
            self._read(sequence_id, row.tolist(), finished=False)

    def start(self, answers: list[Answer], alive: Callable[[], None]) -> None:
        for answer in answers:
            self._read(answer.sequence_id, answer.prompt_ids + answer.response_ids, finished=True)

    def _read(self, sequence_id: int, tokens: list[int], finished: bool) -> None:
        state = self._states.setdefault(sequence_id, PrefixState([], self._block))
        state.tokens = tokens
        state.finished = finished  # after the tokens: see `PrefixState.due`
        self._last_progress = time.monotonic()
        self._loop.start(self._follow(sequence_id, state))

    async def _follow(self, sequence_id: int, state: PrefixState) -> None:
        """In the loop's thread: send requests until nothing is due. One coroutine per answer; others return at once."""
        if state.in_flight:
            return
        state.in_flight = True
        try:
            while (due := state.due()) is not None:
                tokens, finished = due
                pooled = await self._encode(f"{sequence_id}.{next(self._numbers)}", tokens)
                state.note(len(tokens), pooled.num_cached_tokens)
                self._record(sequence_id, state, _parse_score(pooled) if finished else None)
        except Exception as error:  # noqa: BLE001 - `wait` reports every error
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            state.in_flight = False

    async def _encode(self, request_id: str, tokens: list[int]) -> Pooled:
        request = self.engine.encode({"prompt_token_ids": tokens}, self._parameters(), request_id)
        outputs: list[Pooled] = [output async for output in request]
        if not outputs or outputs[-1].error is not None:
            raise RewardError(f"vLLM's reward model did not read request {request_id}: {outputs and outputs[-1].error}")
        return outputs[-1]

    def _record(self, sequence_id: int, state: PrefixState, score: float | None) -> None:
        with self._changed:
            self._last_progress = time.monotonic()
            if score is not None and not state.over:
                self._scores[sequence_id] = score
                state.over = True
                self._changed.notify_all()

    def wait(self, sequence_ids: list[int], timeout_s: float) -> bool:
        """Raises RewardError when the engine failed, or reported no progress for `loop.timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._all_scored(sequence_ids), timeout_s)
            if self._error is not None:
                error = self._error
                raise RewardError(f"vLLM's reward model failed: {type(error).__name__}: {error}") from error
            idle_s = time.monotonic() - self._last_progress
            if not self._all_scored(sequence_ids) and idle_s > self._loop.timeout_s:
                raise RewardError(
                    f"vLLM's reward model has reported nothing for {idle_s:.0f} s, so it is assumed to hang"
                    " (resources.longest_silence_s)"
                )
            return self._all_scored(sequence_ids)

    def _all_scored(self, sequence_ids: list[int]) -> bool:
        return all(i in self._scores for i in sequence_ids)

    def score(self, sequence_id: int) -> float:
        return self._scores[sequence_id]

    def cached(self, sequence_id: int) -> tuple[int, int]:
        state = self._states.get(sequence_id)
        return (state.known, state.hits) if state is not None else (0, 0)

    def forget(self, sequence_id: int) -> None:
        """Drop an answer. A request in flight ends by itself; its result is ignored."""
        state = self._states.pop(sequence_id, None)
        with self._changed:
            if state is not None:
                state.over = True
            self._scores.pop(sequence_id, None)

    def close(self) -> None:
        try:
            self.engine.shutdown()
        finally:
            self._loop.close()


def _parse_score(pooled: Pooled) -> float:
    """The one score of a text. Raises RewardError when there is not exactly one number."""
    numbers = pooled.outputs.data.reshape(-1)
    if len(numbers) != 1:
        raise RewardError(f"vLLM's reward model gives {len(numbers)} numbers per text, not one")
    return float(numbers[0])


def check_classifier(folder: Path) -> None:
    """Raises ModelFolderError when vLLM would not serve the model as a classifier with one label."""
    config: dict[str, Any] = read_config(folder)
    names = config.get("architectures") or [""]
    labels = label_count(config)
    if not names[0].endswith(CLASSIFIER) or labels != 1:
        raise ModelFolderError(
            f"{folder} is {names[0] or 'of no architecture'} with {labels} labels; models.reward.served_by vllm needs a model for"
            f" sequence classification (…{CLASSIFIER}) with one; choose served_by torch"
        )


def build_vllm_reward(folder: Path, arguments: dict[str, Any], timeout_s: float, placement: Placement) -> PrefixReward:
    """The reward model in `folder`, served by vLLM in another process.

    Args:
        arguments: see `reward_arguments`.
        timeout_s: limit for one request, seconds.

    Raises:
        ImportError: vLLM is not installed.
        ModelFolderError: it is no sequence classifier with one label.
        VllmError: it does not start.
    """
    check_classifier(folder)
    loop = AsyncioThread(timeout_s)

    async def start() -> PoolingEngine:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        started: PoolingEngine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        return started

    try:
        with vllm_environment(placement, loop.resources):
            import vllm  # noqa: F401 - ImportError here, not in the loop

            engine = loop.run(start(), "starting the reward model", START_TIMEOUT_S)
        return PrefixReward(engine, loop, placement.block_tokens)
    except BaseException:
        loop.close()
        raise
